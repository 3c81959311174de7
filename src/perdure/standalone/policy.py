"""When to save: steps or time, whichever first, and never beyond the budget."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

from perdure.core.errors import ConfigError

BUDGET = 0.1
"""Share of the time that saving may take."""
RECOVERY = 0.25
"""How far the estimate of a save's cost falls towards a lower measurement, per save."""
BASELINE_STEPS = 31
"""Steps without a save in the background whose median is the undisturbed duration."""


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Made by :func:`every`."""

    steps: int | None
    seconds: float | None
    budget: float


def every(
    *,
    steps: int | None = None,
    minutes: float | None = None,
    seconds: float | None = None,
    budget: float = BUDGET,
) -> SavePolicy:
    """Save every ``steps`` steps or every ``minutes`` (or ``seconds``), whichever comes first.

    Args:
        steps: A save is due when the count of completed steps passes a multiple of this.
        minutes: A save is due when this much time has passed since the last one.
        seconds: The same in seconds; both add up.
        budget: Share of the time that saving may cost (waiting for the copy, and steps that are
            slower while a save is written). Saves that cost more are made less often.

    Raises:
        ConfigError: Nothing is set, or a bound is no number or out of range.
    """
    steps = whole(steps, where="save")
    for name, value in (("minutes", minutes), ("seconds", seconds), ("budget", budget)):
        if not isinstance(value, SupportsFloat | None) or isinstance(value, bool):
            raise _refused(f"{name} = {value!r}", "a number")
    period_s = None if minutes is None and seconds is None else 60 * (minutes or 0) + (seconds or 0)
    if steps is None and period_s is None:
        raise _refused("neither steps nor a time is set", "a save needs a trigger")
    if steps is not None and steps < 1:
        raise _refused(f"steps = {steps}", "at least 1")
    if period_s is not None and not (period_s > 0 and math.isfinite(period_s)):
        raise _refused(f"a time of {period_s:g} s", "a finite time above 0")
    if not 0 < budget <= 1:
        raise _refused(f"budget = {budget:g}", "above 0 and at most 1, a share of the time")
    return SavePolicy(steps, period_s, budget)


def whole(value: object, *, where: str) -> int | None:
    """A number of steps, whatever its type. Raises ``ConfigError``: negative, or not whole."""
    if value is None:
        return None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and value.__index__() >= 0:
        return value.__index__()
    raise ConfigError(
        f"{value!r} steps",
        where=where,
        rule="steps are counted: a whole number",
        way_out="write it without a fraction, for example int(1e6)",
    )


def _refused(what: str, rule: str) -> ConfigError:
    return ConfigError(
        what, where="save", rule=rule, way_out="write save=every(steps=2000, minutes=20)"
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to save now, why, and what to tell the user."""

    save: bool
    reason: str = ""
    warning: str = ""


class SaveTrigger:
    """Decides at every safe point. Pure: the time is an argument.

    A save costs its blocked time plus what steps lose while it is written in the background,
    measured against the median of undisturbed steps. With an estimated cost of ``c`` the next due
    save waits until ``c / budget`` seconds have passed since the last one. The estimate rises at
    once and falls slowly. One warning is given for every stretch of saves that had to wait.
    """

    def __init__(self, policy: SavePolicy, *, step: int, now_s: float) -> None:
        self.policy = policy
        self.cost_s = 0.0
        """Estimated cost of one save."""
        self._saved_step = step
        self._saved_s = now_s
        self._step_from_s = now_s
        self._undisturbed: deque[float] = deque(maxlen=BASELINE_STEPS)
        self._running_cost_s: float | None = None
        self._held_back = False
        self._warned = False

    @property
    def least_interval_s(self) -> float:
        """Seconds that saves are apart at least, by the budget."""
        return self.cost_s / self.policy.budget

    def step_completed(self, now_s: float, *, saving: bool) -> None:
        """A step ended; ``saving``: a save was in the background during it."""
        took_s = now_s - self._step_from_s
        self._step_from_s = now_s
        if self._running_cost_s is None:
            self._undisturbed.append(took_s)
            return
        if self._undisturbed:
            self._running_cost_s += max(0.0, took_s - statistics.median(self._undisturbed))
        if not saving:
            self._settle()

    def decide(self, step: int, now_s: float) -> Decision:
        """Whether a save is due after ``step``."""
        reason = self._due(step, now_s)
        if not reason:
            return Decision(save=False)
        if now_s - self._saved_s >= self.least_interval_s:
            return Decision(save=True, reason=reason)
        self._held_back = True
        if self._warned:
            return Decision(save=False, reason=reason)
        self._warned = True
        return Decision(save=False, reason=reason, warning=self._warning())

    def saved(self, step: int, *, started_s: float, ended_s: float) -> None:
        """A save was handed over after blocking from ``started_s`` to ``ended_s``."""
        self._settle()
        self._running_cost_s = ended_s - started_s
        self._step_from_s = ended_s
        self._begin_interval(step, started_s)

    def skipped(self, step: int, now_s: float) -> None:
        """A due save found no free arena: the next one is due an interval later."""
        self._begin_interval(step, now_s)

    def _begin_interval(self, step: int, now_s: float) -> None:
        self._saved_step, self._saved_s = step, now_s
        if not self._held_back:
            self._warned = False
        self._held_back = False

    def _due(self, step: int, now_s: float) -> str:
        steps, seconds = self.policy.steps, self.policy.seconds
        if steps is not None and step // steps > self._saved_step // steps:
            return "steps"
        if seconds is not None and now_s - self._saved_s >= seconds:
            return "time"
        return ""

    def _settle(self) -> None:
        """The running save is over: count its cost."""
        if self._running_cost_s is None:
            return
        cost_s, self._running_cost_s = self._running_cost_s, None
        if cost_s >= self.cost_s:
            self.cost_s = cost_s
        else:
            self.cost_s += RECOVERY * (cost_s - self.cost_s)

    def _warning(self) -> str:
        return (
            f"a save costs {self.cost_s:.3g} s, so saves are at least {self.least_interval_s:.3g} s"
            f" apart to stay within {self.policy.budget:.0%} of the time;"
            " save less often, or raise the budget of every()"
        )
