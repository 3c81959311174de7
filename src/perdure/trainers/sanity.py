"""What must hold before a run is claimed and before anything is trained. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from perdure.checkpoint.manifest import CHECKPOINTS, MANIFEST, decode_manifest
from perdure.core.errors import DamagedError, FutureFormatError
from perdure.core.events import EventSink
from perdure.core.ids import LogPosition
from perdure.core.record_types import Stream
from perdure.core.storage_api import Storage
from perdure.experience import ExperienceState, read_run
from perdure.experience.segments import SegmentName
from perdure.runtime.metrics_files import STEPS_PATH, read_rows
from perdure.trainers.progress import Progress


def check_log_reaches_checkpoints(storage: Storage) -> None:
    """The log has every place that a checkpoint on disk refers to.

    A claim settles for good where the log ends, so a log that was emptied or cut must be noticed
    before. Checkpoints that cannot be read say nothing here; choosing one judges them.

    Raises:
        DamagedError: The log is shorter than a checkpoint says.
    """
    run_id = read_run(storage).run_id
    for name in storage.list(CHECKPOINTS):
        path = f"{CHECKPOINTS}/{name}/{MANIFEST}"
        if not storage.exists(path):
            continue
        try:
            info = decode_manifest(storage.read(path), where=path).info
        except (DamagedError, FutureFormatError):
            continue
        if info.lineage.get("run_id") == run_id:
            _require_written(storage, info.position, name)


def _require_written(storage: Storage, position: LogPosition, checkpoint: str) -> None:
    segment = SegmentName(position.incarnation, Stream.CONTROL, position.segment)
    size = storage.size(segment.path) if storage.exists(segment.path) else 0
    if size < position.offset:
        raise DamagedError(
            f"{size} bytes, checkpoint {checkpoint} refers to byte {position.offset}",
            where=segment.path,
            rule="a checkpoint is staged behind durable records, so durable records are gone",
            way_out="put log/ back from a copy; nothing was changed",
        )


def check_restored(
    progress: Progress, *, last_step: int, weights: Mapping[str, torch.Tensor]
) -> None:
    """Counters agree with the log and every weight is finite.

    Args:
        last_step: Highest global step that is done in the kept lineage.
        weights: The restored policy.

    Raises:
        DamagedError: The checkpoint is whole byte for byte, yet its content cannot be right.
    """
    if progress.global_step > last_step or progress.local_updates != 0:
        raise DamagedError(
            f"restored progress is step {progress.global_step} (+{progress.local_updates} local"
            f" updates), the log ends with step {last_step}",
            where="restored checkpoint",
            rule="a checkpoint lies at the end of a step that the log has",
            way_out="resume a copy of the run, and report how this one was made",
        )
    broken = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise DamagedError(
            f"weights are not finite: {', '.join(broken[:3])}",
            where="restored checkpoint",
            rule="training goes on from finite weights only",
            way_out="resume with an older checkpoint: move this one's directory away",
        )


def check_curve(state: ExperienceState, run_dir: Path, *, events: EventSink) -> None:
    """The log has every step that the curve shows.

    A row is written after its ``step_done`` record was acknowledged, so a row of a later step means
    that acknowledged records are gone. After a rewind the curve may still show void steps. A curve
    that cannot be read is reported; it is going to be written again from the log.

    Raises:
        DamagedError: The log is shorter than the curve.
    """
    if any(record.base_position is not None for record in state.incarnations):
        return
    try:
        rows = read_rows(run_dir / STEPS_PATH)
    except DamagedError as error:
        events("warning", {"message": str(error)})
        return
    last = int(str(rows[-1]["global_step"])) if rows else 0
    if last > state.last_step:
        raise DamagedError(
            f"the log ends with step {state.last_step}, {STEPS_PATH} shows step {last}",
            where="log",
            rule="a row is written after its record is durable, so durable records are gone",
            way_out="replace the run directory by a copy, seals/ and incarnations/ included,"
            " or move metrics/ away to accept the loss",
        )
