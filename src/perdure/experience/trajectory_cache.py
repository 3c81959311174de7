"""Trajectories at hand: those that are not durable yet, and the newest others within a bound."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.core.ids import GroupId, SessionId
from perdure.core.trajectories import Trajectory


class TrajectoryCache:
    """Drops the durable trajectories of the oldest group above ``limit_bytes`` of arrays.

    What is not durable stays whatever the limit; the log bounds how much that can be.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._waiting: dict[SessionId, Trajectory] = {}
        self._durable: dict[GroupId, dict[int, Trajectory]] = {}
        """By session index; groups in the order in which the first of it became durable."""

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Hold trajectories that the log does not have yet."""
        for trajectory in trajectories:
            self._waiting[trajectory.session] = trajectory
            self._bytes += trajectory.nbytes
        self._make_room()

    def get(self, session: SessionId) -> Trajectory | None:
        durable = self._durable.get(session.group, {})
        return durable.get(session.index) or self._waiting.get(session)

    def allow_drop(self, sessions: Iterable[SessionId]) -> None:
        """The log has these: they may go when room is needed."""
        for session in sessions:
            group = self._durable.setdefault(session.group, {})
            group[session.index] = self._waiting.pop(session)
        self._make_room()

    def drop(self, group: GroupId) -> None:
        """Forget the durable trajectories of a group."""
        dropped = self._durable.pop(group, {})
        self._bytes -= sum([trajectory.nbytes for trajectory in dropped.values()])

    def check(self) -> None:
        """Assert that the byte count agrees with what is held, and the limit with what may go."""
        held = {t.session: t for group in self._durable.values() for t in group.values()}
        assert not self._waiting.keys() & held.keys()
        held |= self._waiting
        assert sum(trajectory.nbytes for trajectory in held.values()) == self._bytes
        assert self._bytes <= self._limit or not self._durable

    def _make_room(self) -> None:
        while self._bytes > self._limit and self._durable:
            self.drop(next(iter(self._durable)))
