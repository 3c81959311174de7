"""Whether the log of a run has every place that its checkpoints refer to."""

from __future__ import annotations

from perdure.checkpoint.manifest import CHECKPOINTS, MANIFEST, decode_manifest
from perdure.core.errors import DamagedError, FutureFormatError, StorageError
from perdure.core.ids import LogPosition
from perdure.core.record_types import Stream
from perdure.core.storage_api import Storage
from perdure.experience import read_run
from perdure.experience.segments import SegmentName

LOG_END = "log_end"
"""Key of a manifest's lineage: end of the acknowledged log when its state was staged."""


def log_end(position: LogPosition) -> dict[str, list[int]]:
    """What a manifest's lineage says of it."""
    return {LOG_END: [position.incarnation, position.segment, position.offset]}


def check_log_reaches_checkpoints(storage: Storage) -> None:
    """The log has every place that a checkpoint on disk refers to, and all that lay before it.

    A claim settles for good where the log ends, so a log that was emptied or cut must be noticed
    before. A checkpoint that is staged while steps are trained again refers to a place of an
    earlier incarnation: it alone may tell that its own has written anything. Checkpoints that
    cannot be read say nothing here; choosing one judges them.

    Raises:
        DamagedError: The log is shorter than a checkpoint says.
    """
    run_id = read_run(storage).run_id
    for name in storage.list(CHECKPOINTS):
        path = f"{CHECKPOINTS}/{name}/{MANIFEST}"
        try:
            if not storage.exists(path):
                continue
            info = decode_manifest(storage.read(path), where=path).info
        except (DamagedError, FutureFormatError, StorageError):
            continue
        if info.lineage.get("run_id") != run_id:
            continue
        _require_written(storage, info.position, name)
        if LOG_END in info.lineage:
            _require_written(storage, LogPosition(*info.lineage[LOG_END]), name)


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
