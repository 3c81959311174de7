"""The learning rate as a function of a position: no state but the position."""

from __future__ import annotations

import math

from perdure.learner.config import ScheduleConfig


def rate_factor(config: ScheduleConfig, position: int, horizon: int) -> float:
    """Learning rate at ``position`` (from 0) as a fraction of the base rate.

    During the warm-up ``(position + 1) / warmup_updates``; then from 1 at its end towards
    ``final_fraction`` at ``horizon``, which is kept beyond. Cosine: Loshchilov & Hutter 2017
    (arXiv:1608.03983, eq. 5) without restarts.
    """
    if position < config.warmup_updates:
        return (position + 1) / config.warmup_updates
    if config.kind == "constant":
        return 1.0
    span = max(horizon - config.warmup_updates, 1)
    progress = min((position - config.warmup_updates) / span, 1.0)
    falling = 1 - progress if config.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_fraction + (1 - config.final_fraction) * falling


class LearningRate:
    """Position in a schedule, together with the schedule it is a position in."""

    def __init__(self, config: ScheduleConfig, *, horizon: int) -> None:
        self.config = config
        self.horizon = horizon
        """Number of positions the schedule is spread over."""
        self.position = 0
        """Completed local updates."""

    def factor(self) -> float:
        """Fraction of the base rates that holds now."""
        return rate_factor(self.config, self.position, self.horizon)
