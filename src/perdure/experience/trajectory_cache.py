"""Trajectories at hand: those that are not durable yet, and the newest others within a bound."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from perdure.core.ids import GroupId, SessionId
from perdure.core.trajectories import Trajectory
from perdure.experience.columns import LooseTrajectories
from perdure.experience.packed import PackedTrajectories

_Rows = dict[int, Trajectory | PackedTrajectories]
"""By session index. Plain numbers are looked up several times as fast as session ids."""


class TrajectoryCache:
    """Drops the durable trajectories of the oldest group above ``limit_bytes`` of arrays.

    What is not durable stays whatever the limit; the log bounds how much that can be.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._waiting: dict[GroupId, _Rows] = {}
        self._durable: dict[GroupId, _Rows] = {}
        """Groups in the order in which the first of their sessions became durable."""

    def add(self, trajectories: LooseTrajectories | PackedTrajectories | None) -> None:
        """Hold trajectories, if there are any, that the log does not have yet."""
        if trajectories is None:
            return
        ids = trajectories.columns.fields["sessions"]
        packed = isinstance(trajectories, PackedTrajectories)
        rows = [trajectories] * len(ids) if packed else trajectories.rows
        for (number, index), one in zip(ids, rows, strict=True):
            group = self._waiting.get(number)
            if group is None:
                group = self._waiting[number] = {}
            group[index] = one
        self._bytes += trajectories.nbytes
        self._make_room()

    def get(self, session: SessionId) -> Trajectory | None:
        for held in (self._durable, self._waiting):
            found = held.get(session.group, {}).get(session.index)
            if found is not None:
                return found.trajectory(session) if isinstance(found, PackedTrajectories) else found
        return None

    def allow_drop(self, sessions: Iterable[SessionId]) -> None:
        """The log has these: they may go when room is needed."""
        for number, some in groupby(sessions, attrgetter("group")):
            indexes = [session.index for session in some]
            waiting = self._waiting[number]
            if len(indexes) == len(waiting) and number not in self._durable:
                self._durable[number] = self._waiting.pop(number)
                continue
            group = self._durable.setdefault(number, {})
            for index in indexes:
                group[index] = waiting.pop(index)
            if not waiting:
                del self._waiting[number]
        self._make_room()

    def drop(self, group: GroupId) -> None:
        """Forget the durable trajectories of a group."""
        dropped = self._durable.pop(group, {})
        sizes = [_nbytes(held, SessionId(group, index)) for index, held in dropped.items()]
        self._bytes -= sum(sizes)

    def check(self) -> None:
        """Assert that the byte count agrees with what is held, and the limit with what may go."""
        held = [
            (SessionId(group, index), one)
            for groups in (self._durable, self._waiting)
            for group, some in groups.items()
            for index, one in some.items()
        ]
        assert len({session for session, _ in held}) == len(held)
        assert all(self._waiting.values())
        assert sum([_nbytes(one, session) for session, one in held]) == self._bytes
        assert self._bytes <= self._limit or not self._durable

    def _make_room(self) -> None:
        while self._bytes > self._limit and self._durable:
            self.drop(next(iter(self._durable)))


def _nbytes(held: Trajectory | PackedTrajectories, session: SessionId) -> int:
    return held.nbytes_of(session) if isinstance(held, PackedTrajectories) else held.nbytes
