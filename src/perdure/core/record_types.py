"""The enumerations that records are made of. Their values are part of the log's format."""

from __future__ import annotations

import enum


class RecordType(enum.IntEnum):
    """Number of a record type in the record header. Numbers are never reused."""

    SEGMENT_OPENED = 1
    INCARNATION_STARTED = 2
    SUBMITTED = 3
    SESSIONS_DONE = 4
    GROUP_SETTLED = 5
    PARTIALS = 6
    TOOL_RESULT = 7
    TAKEN = 8
    STEP_DONE = 9
    REDONE = 10
    PUBLISHED = 11
    EVICTED = 12
    REFILLED = 13
    CHECKPOINTED = 14
    COLLECT = 15
    EVALUATED = 16
    PHASE_STEP = 17
    UPDATE_FAILED = 18
    CLOSED = 19
    SESSION_RESTARTED = 20
    TRAJECTORIES = 101
    PARTIAL_TOKENS = 102
    TRANSITIONS = 103


DECISION_TYPES = frozenset(
    {
        RecordType.TAKEN,
        RecordType.STEP_DONE,
        RecordType.REDONE,
        RecordType.PUBLISHED,
        RecordType.EVICTED,
        RecordType.REFILLED,
        RecordType.CHECKPOINTED,
        RecordType.EVALUATED,
        RecordType.PHASE_STEP,
        RecordType.UPDATE_FAILED,
    }
)
"""Record types that a rewind makes void; the others (experience itself) are never void."""


class Stream(enum.Enum):
    """The two streams of an incarnation's log."""

    CONTROL = "control"
    PAYLOAD = "payload"


class GroupOutcome(enum.Enum):
    """How a prompt group became terminal."""

    FINISHED = "finished"
    FAILED = "failed"


class EvictionReason(enum.Enum):
    """Why a group left without being trained."""

    AGE = "age"
    FAILED = "failed"
    FILTERED = "filtered"
    VERSION_SPAN = "version_span"
    VERSION_LAG = "version_lag"
    POISON = "poison"
    ABANDONED = "abandoned"


class StopReason(enum.Enum):
    """Why generation of a session ended."""

    # Members are singletons; the inherited hash, of the name, is slow where tokens are counted.
    __hash__ = object.__hash__

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
