"""The life of a prompt group: one table, everything else is an error.

``pending → running → finished | failed``, ``finished → taken → trained``,
``finished | failed → evicted``, and ``taken → evicted`` for reason poison alone.
"""

from __future__ import annotations

import enum
from types import MappingProxyType

from perdure.core.errors import LifecycleError
from perdure.core.ids import GroupId


class GroupState(enum.Enum):
    """Where a prompt group stands; it is in exactly one state."""

    # Members are singletons; the hash of an enumeration's name is slow to come by.
    __hash__ = object.__hash__

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    TAKEN = "taken"
    TRAINED = "trained"
    EVICTED = "evicted"


class GroupEvent(enum.Enum):
    """What can happen to a submitted group."""

    __hash__ = object.__hash__

    PROGRESS = "progress"
    """A session was started, left a partial or is done."""
    FINISH = "finish"
    FAIL = "fail"
    TAKE = "take"
    TRAIN = "train"
    """The global step that took the group is done."""
    EVICT = "evict"
    POISON = "poison"
    """Eviction because training the group killed the trainer."""


TRANSITIONS = MappingProxyType(
    {
        (GroupState.PENDING, GroupEvent.PROGRESS): GroupState.RUNNING,
        (GroupState.PENDING, GroupEvent.FAIL): GroupState.FAILED,
        (GroupState.RUNNING, GroupEvent.PROGRESS): GroupState.RUNNING,
        (GroupState.RUNNING, GroupEvent.FINISH): GroupState.FINISHED,
        (GroupState.RUNNING, GroupEvent.FAIL): GroupState.FAILED,
        (GroupState.FINISHED, GroupEvent.TAKE): GroupState.TAKEN,
        (GroupState.FINISHED, GroupEvent.EVICT): GroupState.EVICTED,
        (GroupState.FINISHED, GroupEvent.POISON): GroupState.EVICTED,
        (GroupState.FAILED, GroupEvent.EVICT): GroupState.EVICTED,
        (GroupState.FAILED, GroupEvent.POISON): GroupState.EVICTED,
        (GroupState.TAKEN, GroupEvent.TRAIN): GroupState.TRAINED,
        (GroupState.TAKEN, GroupEvent.POISON): GroupState.EVICTED,
    }
)
"""``(state, event)`` to the next state; a pair that is absent is illegal."""

OPEN = frozenset({GroupState.PENDING, GroupState.RUNNING})
"""States in which sessions still work on a group."""


def advance(group: GroupId, state: GroupState, event: GroupEvent) -> GroupState:
    """The state after ``event``.

    Raises:
        LifecycleError: The event is illegal in this state.
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        legal = sorted(e.value for s, e in TRANSITIONS if s is state)
        raise LifecycleError(
            f"event {event.value} is illegal while {state.value}",
            where=f"group {group}",
            rule=f"a {state.value} group allows: {', '.join(legal) or 'nothing'}",
            way_out="run `perdure audit` on the run and report what it finds",
        )
    return after
