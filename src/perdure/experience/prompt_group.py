"""One prompt group as the fold keeps it, and what stays of one that nobody needs any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from perdure.core.experience_records import (
    SessionsDone,
    Submitted,
    ToolResult,
)
from perdure.core.ids import PayloadRef, PolicyVersion, SessionId
from perdure.experience.lifecycle import GroupState
from perdure.experience.unfinished import Unfinished

_ROWS = 2**32
"""More than any record has."""


@dataclass(slots=True)
class SessionBatch:
    """Sessions settled together; ``payload`` is None while they are not durable.

    Attributes:
        first_row: Row of the payload at which theirs begin.
    """

    record: SessionsDone
    payload: PayloadRef | None
    first_row: int = 0


class SettledSession(NamedTuple):
    """A session that is done: a row of a record."""

    batch: SessionBatch
    row: int

    @property
    def reward(self) -> float:
        return self.batch.record.rewards[self.row]

    @property
    def first_version(self) -> PolicyVersion:
        """Lowest policy version that generated some of it."""
        return self.batch.record.first_versions[self.row]

    @property
    def last_version(self) -> PolicyVersion:
        """Highest policy version that generated some of it."""
        return self.batch.record.last_versions[self.row]


@dataclass(slots=True)
class Group:
    """One prompt group.

    Attributes:
        reason: Why the group failed.
        uniform: Finished with equal rewards in several sessions: nothing to learn from.
        rewards: Session index → its settled reward.
        keys: Idempotency keys of the group's own records that counted.
        unfinished: Session index → what it has left so far; only of an open group.
    """

    submitted: Submitted
    state: GroupState = GroupState.PENDING
    reason: str = ""
    uniform: bool = False
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    keys: set[str] = field(default_factory=set[str])
    unfinished: dict[int, Unfinished] = field(default_factory=dict[int, Unfinished])
    _batches: list[SessionBatch] = field(default_factory=list["SessionBatch"])
    # Number of the batch and row in it. Of a million sessions the garbage collector has to look at
    # everything but plain numbers.
    _rows: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def done(self) -> dict[int, SettledSession]:
        """Session index → what settled it."""
        return {index: self.settled(index) for index in self._rows}

    def settled(self, index: int) -> SettledSession:
        """What settled a session that is done."""
        number, row = divmod(self._rows[index], _ROWS)
        return SettledSession(self._batches[number], row)

    def settle(self, batch: SessionBatch, rows: Mapping[int, int]) -> None:
        """Sessions are done: index → row of the batch."""
        first = len(self._batches) * _ROWS
        self._batches.append(batch)
        self._rows |= {index: first + row for index, row in rows.items()} if first else rows
        rewards = batch.record.rewards
        self.rewards.update({index: rewards[row] for index, row in rows.items()})
        if self.unfinished:
            for index in self.unfinished.keys() & rows.keys():
                del self.unfinished[index]

    def contradicts(self, record: ToolResult) -> bool:
        """Whether the call, of the newest attempt, had another result."""
        unfinished = self.unfinished.get(record.session.index)
        if unfinished is None or unfinished.attempt != record.attempt:
            return False
        return unfinished.results.get((record.turn, record.call), record) != record

    @property
    def missing(self) -> tuple[SessionId, ...]:
        """Sessions without a settled reward, by index."""
        group, count = self.submitted.group, self.submitted.sessions
        return tuple([SessionId(group, i) for i in range(count) if i not in self.rewards])


@dataclass(frozen=True, slots=True)
class Retired:
    """What stays of a group nobody needs any more."""

    state: GroupState
    done: int
    """Bit i is set if session i was settled."""

    def has(self, index: int) -> bool:
        """Whether a session was settled; False for one that the group never had."""
        return 0 <= index < self.done.bit_length() and bool(self.done >> index & 1)
