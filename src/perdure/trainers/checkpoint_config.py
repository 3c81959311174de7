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

    writer: Literal["auto", "process", "thread"] = "auto"
    """Who writes: a process of its own, a thread of this one, or a process for large ones only."""
    arenas: Literal[1, 2] = 2
    """Copies of the state in memory beside it; with 1 a checkpoint that is due while the one before
    is still being written is skipped."""
    remote: str | None = None
    """Where checkpoints and the log are shipped as well: ``s3://bucket/prefix`` or
    ``file:///path``, one for each run. Without it the loss of the disk is the loss of the run."""
    remote_keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that stay there, beside those kept for their step or a metric."""
    log_ship_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time between two shipments of the log's tail: what a lost disk may cost."""

    ship_at_end_s: Annotated[float, Field(gt=0)] = 60.0
    """How long the end of an incarnation waits for what is not shipped yet."""

    def problems(self) -> Iterable[Problem]:
        if self.keep_best is not None and not self.keep_best.startswith(("train/", "held_out/")):
            yield Problem(
                "keep_best",
                self.keep_best,
                "names of metrics begin with train/ or held_out/",
                f"set keep_best=train/{self.keep_best}",
            )
        if self.remote is not None and not self.remote.startswith(("s3://", "file:///")):
            yield Problem(
                "remote",
                self.remote,
                "is a bucket with a prefix or the whole path of a directory",
                "set remote=s3://bucket/prefix or remote=file:///path",
            )
