"""What must hold after a restore, before anything is trained. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from perdure.core.errors import DamagedError
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
