"""Spillover: whether an idle learner should generate for a while (spec B4). Decides, does nothing.

Facts and numbers of the rule are those of verl's ``separate_async`` (its pull request 7373); what
is different here: a decision for every wait instead of one a step, and none while engines have
free slots, which another engine could not fill.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class SpilloverRules:
    """Constants of the rule.

    Attributes:
        ratio: Share of a step's groups that are to be ready before the learner leaves, at first.
        step_up: Added to it for each idle step, beginning with the ``hysteresis``-th in a row.
        step_down: Taken off it for each calm step, likewise.
        hysteresis: Steps of one kind in a row before the ratio moves.
        window: Switches, and waits, whose costs are remembered; a cold start is soon forgotten.
    """

    ratio: float = 0.4
    step_up: float = 0.05
    step_down: float = 0.03
    hysteresis: int = 2
    window: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio {self.ratio:g}: must be above 0 and at most 1")
        if min(self.hysteresis, self.window) < 1:
            raise ValueError("hysteresis and window must be at least 1")


@dataclass(frozen=True, slots=True)
class Threshold:
    """How many groups are to be ready before a helping learner leaves; adapts to idle time.

    Attributes:
        streak: Steps of one kind in a row; idle ones are counted up from 1, calm ones down from -1.
    """

    rules: SpilloverRules
    ratio: float
    streak: int = 0

    def groups(self, *, batch: int, updates: int) -> int:
        """Groups, at least those of one local update of ``batch / updates``, at most ``batch``."""
        return min(max(round(self.ratio * batch), batch // updates), batch)

    def after(self, *, idle: bool) -> Threshold:
        """After a step in which the learner waited for longer than a switch takes, or did not."""
        streak = max(self.streak, 0) + 1 if idle else min(self.streak, 0) - 1
        ratio = self.ratio
        if abs(streak) >= self.rules.hysteresis:
            ratio += self.rules.step_up if idle else -self.rules.step_down
        return replace(self, ratio=min(max(ratio, 0.0), 1.0), streak=streak)


@dataclass(slots=True)
class SwitchCosts:
    """What joining and leaving have cost lately, in seconds."""

    window: int
    joins_s: deque[float] = field(init=False)
    leaves_s: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.joins_s = deque(maxlen=self.window)
        self.leaves_s = deque(maxlen=self.window)

    @property
    def switch_s(self) -> float | None:
        """Of a whole visit; None before the first."""
        if not (self.joins_s and self.leaves_s):
            return None
        return _mean(self.joins_s) + _mean(self.leaves_s)


@dataclass(slots=True)
class GroupPace:
    """How fast the rollout pool settles groups without help."""

    window: int
    _waits: deque[tuple[int, float]] = field(init=False)

    def __post_init__(self) -> None:
        self._waits = deque(maxlen=self.window)

    def settled(self, groups: int, *, seconds: float, scaling: float) -> None:
        """So many in so long, by a pool ``scaling`` times as large."""
        self._waits.append((groups, seconds * scaling))

    @property
    def seconds_per_group(self) -> float | None:
        """None as long as nothing has settled."""
        groups = sum(groups for groups, _ in self._waits)
        return sum(seconds for _, seconds in self._waits) / groups if groups else None


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision looks at.

    Attributes:
        missing: Groups that the learner waits for.
        queued: Sessions beyond the engines' slots.
        scaling: Slots with the learner's devices over slots without them.
        seconds_per_group: Of the pool alone; None if not known.
        switch_s: Cost of a visit; None if not known.
    """

    missing: int
    queued: int
    scaling: float
    seconds_per_group: float | None
    switch_s: float | None


@dataclass(frozen=True, slots=True)
class SpilloverDecision:
    """Whether the learner generates for a while, why, and what that would save.

    Attributes:
        saves_s: Seconds of waiting; None if not known.
    """

    lend: bool
    reason: str
    saves_s: float | None = None


def decide_spillover(now: Situation) -> SpilloverDecision:
    """Lend the learner's devices exactly if the wait is shortened by more than the switch costs."""
    if now.missing <= 0:
        return SpilloverDecision(lend=False, reason="enough groups are ready")
    if now.scaling <= 1:
        return SpilloverDecision(lend=False, reason="the learner's devices have no engine")
    if now.queued <= 0:
        return SpilloverDecision(lend=False, reason="the engines have free slots")
    if now.seconds_per_group is None or now.switch_s is None:
        return SpilloverDecision(lend=True, reason="nothing was measured yet")
    saves_s = now.missing * now.seconds_per_group * (1 - 1 / now.scaling)
    if saves_s > now.switch_s:
        return SpilloverDecision(True, "the wait is longer than the switch", saves_s)
    return SpilloverDecision(False, "the switch costs more than it saves", saves_s)
