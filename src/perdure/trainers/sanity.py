"""What must hold before anything is trained. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from perdure.core.errors import DamagedError
from perdure.core.events import EventSink
from perdure.experience import ExperienceState
from perdure.runtime.metrics_files import STEPS_PATH
from perdure.trainers.progress import Progress


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


def check_curve(
    state: ExperienceState, last_step_shown: Callable[[], int], *, events: EventSink
) -> None:
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
        last = last_step_shown()
    except DamagedError as error:
        events("warning", {"message": str(error)})
        return
    if last > state.last_step:
        raise DamagedError(
            f"the log ends with step {state.last_step}, {STEPS_PATH} shows step {last}",
            where="log",
            rule="a row is written after its record is durable, so durable records are gone",
            way_out="replace the run directory by a copy, seals/ and incarnations/ included,"
            " or move metrics/ away to accept the loss",
        )
