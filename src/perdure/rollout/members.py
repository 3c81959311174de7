"""The engines of a pool: what state each is in, and what may happen to it next."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import RolloutEngine
from perdure.rollout.silence import SilenceWatch


class MemberState(enum.Enum):
    """Only a serving engine gets traffic."""

    SERVING = "serving"
    PAUSED = "paused"
    """Held for a moment, to be admitted again: new weights are on their way."""
    QUARANTINED = "quarantined"
    """Has not acknowledged the weights it should have."""
    DRAINING = "draining"
    """Finishes what it has, then leaves."""
    LOST = "lost"


class MemberEvent(enum.Enum):
    """What can happen to an engine of a pool."""

    HOLD = "hold"
    ADMIT = "admit"
    QUARANTINE = "quarantine"
    DRAIN = "drain"
    LOSE = "lose"


_S, _E = MemberState, MemberEvent
TRANSITIONS = {
    (_S.SERVING, _E.HOLD): _S.PAUSED,
    (_S.PAUSED, _E.HOLD): _S.PAUSED,
    (_S.QUARANTINED, _E.HOLD): _S.QUARANTINED,
    (_S.SERVING, _E.ADMIT): _S.SERVING,
    (_S.PAUSED, _E.ADMIT): _S.SERVING,
    (_S.QUARANTINED, _E.ADMIT): _S.SERVING,
    (_S.SERVING, _E.QUARANTINE): _S.QUARANTINED,
    (_S.PAUSED, _E.QUARANTINE): _S.QUARANTINED,
    (_S.QUARANTINED, _E.QUARANTINE): _S.QUARANTINED,
    (_S.SERVING, _E.DRAIN): _S.DRAINING,
    (_S.PAUSED, _E.DRAIN): _S.DRAINING,
    (_S.QUARANTINED, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    **{(state, _E.LOSE): _S.LOST for state in _S},
}
"""(state, event) → state; everything else is an error."""


@dataclass(slots=True, eq=False)
class Member:
    """One engine of a pool.

    Attributes:
        reason: Why it is in its state, for people.
        waiting: Streams that wait for it now.
        watch: Expects tokens while streams wait for them.
    """

    name: str
    engine: RolloutEngine
    watch: SilenceWatch = field(repr=False)
    state: MemberState = MemberState.QUARANTINED
    reason: str = "no weights yet"
    waiting: int = 0

    def apply(self, event: MemberEvent, reason: str = "") -> None:
        """Change the state. Raises ``ValueError`` if the table does not have it."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise ValueError(f"engine {self.name!r} is {self.state.value}: it cannot {event.value}")
        self.state, self.reason = after, reason

    @property
    def takes_weights(self) -> bool:
        """Whether weights are published to it."""
        return self.state in (MemberState.SERVING, MemberState.PAUSED, MemberState.QUARANTINED)

    def begin_waiting(self) -> None:
        """A stream waits for its next chunk."""
        if not self.waiting:
            self.watch.heard()
        self.waiting += 1


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What a person who asks why nothing moves needs to know of one engine."""

    name: str
    state: MemberState
    reason: str
    version: PolicyVersion
    in_flight: int
    silent_s: float
    """Since the last sign of progress; meaningful while requests are in flight."""

    def __str__(self) -> str:
        text = f"{self.name} {self.state.value}, version {self.version}, {self.in_flight} in flight"
        if self.in_flight:
            text += f", silent for {self.silent_s:.1f} s"
        return f"{text} ({self.reason})" if self.reason else text
