"""Settings of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from perdure.config import Problem, Section


class CheckpointConfig(Section):
    """When checkpoints are staged (whichever comes first) and which are kept."""

    every_steps: Annotated[int, Field(ge=1)] = 20
    """Global steps between two checkpoints."""
    every_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which one is due even so."""
    warm_start_every_steps: Annotated[int, Field(ge=1)] = 100
    """Steps of the warm start between two of its checkpoints."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that stay; 2 leaves one to fall back to."""
    keep_every_steps: Annotated[int | None, Field(ge=1)] = None
    """The first checkpoint at or after each multiple of so many global steps stays as well."""
    keep_best: str | None = None
    """Metric by which the best stay as well: ``held_out/accuracy``, ``train/reward``, or another of
    TensorBoard's names. Checkpoints of steps without it are none of the best."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether the highest are the best, or the lowest."""
    keep_best_count: Annotated[int, Field(ge=1)] = 1
    """How many of the best stay."""

    def problems(self) -> Iterable[Problem]:
        if self.keep_best is not None and not self.keep_best.startswith(("train/", "held_out/")):
            yield Problem(
                "keep_best",
                self.keep_best,
                "names of metrics begin with train/ or held_out/",
                f"set keep_best=train/{self.keep_best}",
            )
