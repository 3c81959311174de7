"""Trajectories at hand: those that are not durable yet, and the newest others within a bound."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.core.ids import GroupId, SessionId
from perdure.core.trajectories import Trajectory
from perdure.experience.packed import PackedTrajectories


class TrajectoryCache:
    """Drops the durable trajectories of the oldest group above ``limit_bytes`` of arrays.

    What is not durable stays whatever the limit; the log bounds how much that can be.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._waiting: dict[SessionId, Trajectory | PackedTrajectories] = {}
        self._durable: dict[GroupId, dict[int, Trajectory | PackedTrajectories]] = {}
        """By session index; groups in the order in which the first of it became durable."""

    def add(self, trajectories: Iterable[Trajectory] | PackedTrajectories) -> None:
        """Hold trajectories that the log does not have yet."""
        if isinstance(trajectories, PackedTrajectories):
            self._waiting.update(dict.fromkeys(trajectories.sessions, trajectories))
            self._bytes += trajectories.nbytes
        else:
            for trajectory in trajectories:
                self._waiting[trajectory.session] = trajectory
                self._bytes += trajectory.nbytes
        self._make_room()

    def get(self, session: SessionId) -> Trajectory | None:
        durable = self._durable.get(session.group, {})
        found = durable.get(session.index) or self._waiting.get(session)
        return found.trajectory(session) if isinstance(found, PackedTrajectories) else found

    def allow_drop(self, sessions: Iterable[SessionId]) -> None:
        """The log has these: they may go when room is needed."""
        for session in sessions:
            group = self._durable.setdefault(session.group, {})
            group[session.index] = self._waiting.pop(session)
        self._make_room()

    def drop(self, group: GroupId) -> None:
        """Forget the durable trajectories of a group."""
        dropped = self._durable.pop(group, {})
        sizes = [_nbytes(held, SessionId(group, index)) for index, held in dropped.items()]
        self._bytes -= sum(sizes)

    def check(self) -> None:
        """Assert that the byte count agrees with what is held, and the limit with what may go."""
        held = {
            SessionId(group, index): one
            for group, some in self._durable.items()
            for index, one in some.items()
        }
        assert not self._waiting.keys() & held.keys()
        held |= self._waiting
        assert sum(_nbytes(one, session) for session, one in held.items()) == self._bytes
        assert self._bytes <= self._limit or not self._durable

    def _make_room(self) -> None:
        while self._bytes > self._limit and self._durable:
            self.drop(next(iter(self._durable)))


def _nbytes(held: Trajectory | PackedTrajectories, session: SessionId) -> int:
    return held.nbytes_of(session) if isinstance(held, PackedTrajectories) else held.nbytes
