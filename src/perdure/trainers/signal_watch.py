"""Notices a training that learns nothing: advantages that come from groups need unequal rewards."""

from __future__ import annotations

from collections.abc import Mapping

from perdure.trainers.config import RunConfig

STEPS = 5
"""So many steps in a row without a signal are no bad luck."""
SHARE = 0.95
"""Of the groups of a step: almost all."""
SOLVED = 0.9
"""Mean reward of right-or-wrong verifiers above which equal rewards mean that nothing is left."""


class SignalWatch:
    """Looks at the metrics of each finished step; speaks once."""

    def __init__(self, config: RunConfig) -> None:
        self._from_groups = config.learner.algorithm in ("grpo", "rloo")
        self._silent_steps = 0
        self._told = False

    def look(self, metrics: Mapping[str, float]) -> str | None:
        """What there is to say after a step with these metrics; None almost always."""
        share = metrics.get("groups_without_signal")
        if not self._from_groups or share is None:
            return None
        self._silent_steps = self._silent_steps + 1 if share >= SHARE else 0
        if self._told or self._silent_steps < STEPS:
            return None
        self._told = True
        head = f"for {STEPS} steps almost every group has had equal rewards, so nothing is learned"
        reward = metrics.get("reward", 0.0)
        if reward >= SOLVED:
            return f"{head}: at a mean reward of {reward:.2f} the task is as good as solved"
        return (
            f"{head}: mean reward {reward:.2f}; give the policy a longer warm start"
            " (learner.supervised.steps), easier prompts, more sessions_per_group, or a verifier"
            " that tells half right from wrong"
        )
