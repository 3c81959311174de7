"""What has befallen simulated runs: a campaign that nothing happens in proves nothing.

Every count is of something that took place (a process that ended, a call that failed), never of
what a scenario had in mind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scenarios import Ending

from perdure.core.record_types import EvictionReason
from perdure.storage.faulty import StorageFaultKind

DISK_FAULTS = (
    StorageFaultKind.TORN_WRITE,
    StorageFaultKind.NO_SPACE,
    StorageFaultKind.EIO_WRITE,
    StorageFaultKind.EIO_SYNC,
    StorageFaultKind.EIO_READ,
    StorageFaultKind.SLOW,
)
LATE = "an engine acknowledged too late"
SERVES_AFTER_LATE = "an engine that had acknowledged too late served again"
GARBLED = "an engine acknowledged a wrong digest"
SLOW = "a session was slow"
DIED = "an engine died"
DIED_ASKED = "an engine died when it was asked to pause"
WEDGED = "an engine stopped answering"
RAISED = "the verifier raised"
HUNG = "the verifier hung"
CALL_REPEATED = "a call was made again"
CALL_INTERRUPTED = "a call was cut short"
CALL_HUNG = "a tool hung"
CALL_FAILED = "a service of a tool was away"
CALL_RAISED = "a tool raised"
RETRIED = "a session was retried"
REPLACED = "an engine was replaced"
QUARANTINED = "an engine was quarantined"
LENT = "the learner generated"
REWOUND = "a life went on without redo"
REDONE = "a step was redone"
LOST_ALL = "no engine was left"
DISK = "the disk failed"

_EVENTS = {
    "engine_replaced": REPLACED,
    "engine_quarantined": QUARANTINED,
    "learner_returned": LENT,
    "rewound": REWOUND,
    "redone": REDONE,
    "session_retried": RETRIED,
}
"""Event → what it tells of."""


@dataclass
class Witness:
    """What took place in all lives of a world, and what must not have.

    Attributes:
        wrong: Sentences; who is told of an error may have ways of its own to deal with it.
    """

    seen: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    def event(self, name: str) -> None:
        """The run has told something."""
        if name in _EVENTS:
            self.seen[_EVENTS[name]] += 1

    def ended(self, ending: Ending | None) -> None:
        """A life is over before the training is; None: for want of engines."""
        self.seen[LOST_ALL if ending is None else of_ending(ending)] += 1

    def struck(self, fired: Counter[StorageFaultKind]) -> None:
        """The disk has failed so."""
        self.seen[DISK] += fired.total()
        self.seen.update({of_fault(kind): count for kind, count in fired.items()})

    def evicted(self, reasons: Counter[EvictionReason]) -> None:
        """Groups that the final state does without."""
        self.seen.update({of_eviction(reason): count for reason, count in reasons.items()})


def of_ending(ending: Ending) -> str:
    return f"a life ended by {ending.value}"


def of_fault(kind: StorageFaultKind) -> str:
    return f"the disk: {kind.value}"


def of_eviction(reason: EvictionReason) -> str:
    return f"a group was evicted: {reason.value}"


_ALWAYS = frozenset(
    {
        *map(of_ending, Ending),
        *map(of_eviction, (EvictionReason.FAILED, EvictionReason.FILTERED)),
        *(DISK, REWOUND, REDONE, SLOW, RAISED, HUNG, RETRIED),
        *(CALL_REPEATED, CALL_INTERRUPTED, CALL_HUNG, CALL_FAILED, CALL_RAISED),
    }
)
_STALE = frozenset(
    map(
        of_eviction,
        (EvictionReason.AGE, EvictionReason.VERSION_SPAN, EvictionReason.VERSION_LAG),
    )
)
_REMOTE = frozenset({DIED, WEDGED, REPLACED})
_ENGINES = frozenset({LATE, SERVES_AFTER_LATE, GARBLED, QUARANTINED, LENT})
BEFALLS = {
    "sync": _ALWAYS | _REMOTE | {DIED_ASKED},
    "colocate_async": _ALWAYS | _STALE | _REMOTE | {DIED_ASKED},
    "separate_async": _ALWAYS | _STALE | _REMOTE | _ENGINES,
}
"""What takes place in some seed of every campaign, by mode."""
EVERY_FAULT = frozenset(map(of_fault, DISK_FAULTS))
"""Ways of the disk to fail; a hundred seeds have all of them."""
