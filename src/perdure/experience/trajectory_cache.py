"""Trajectories at hand: those that are not durable yet, and the newest others within a bound."""

from __future__ import annotations

from perdure.core.ids import GroupId, SessionId
from perdure.core.trajectories import Trajectory


class TrajectoryCache:
    """Drops the oldest durable trajectories above ``limit_bytes`` of arrays.

    What is not durable stays whatever the limit; the log bounds how much that can be. Trajectories
    are numbered as they are added, and become durable in that order.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._added = 0
        self._durable = 0
        self._held: dict[int, Trajectory] = {}
        """By number, oldest first."""
        self._numbers: dict[GroupId, dict[int, int]] = {}
        """Group → session index → number."""

    def add(self, trajectory: Trajectory) -> None:
        session = trajectory.session
        self._held[self._added] = trajectory
        self._numbers.setdefault(session.group, {})[session.index] = self._added
        self._added += 1
        self._bytes += trajectory.nbytes
        self._make_room()

    def get(self, session: SessionId) -> Trajectory | None:
        number = self._numbers.get(session.group, {}).get(session.index)
        return None if number is None else self._held[number]

    def allow_drop(self, count: int) -> None:
        """The log has the next ``count``: they may go when room is needed."""
        self._durable += count
        self._make_room()

    def drop_group(self, group: GroupId) -> None:
        """Forget those trajectories of a group that are durable."""
        for number in list(self._numbers.get(group, {}).values()):
            if number < self._durable:
                self._drop(number)

    def check(self) -> None:
        """Assert that the byte count and the indexes agree with what is held."""
        assert sum(trajectory.nbytes for trajectory in self._held.values()) == self._bytes
        assert list(self._held) == sorted(self._held)
        assert all(self._numbers.values())
        assert {
            number: SessionId(group, index)
            for group, numbers in self._numbers.items()
            for index, number in numbers.items()
        } == {number: trajectory.session for number, trajectory in self._held.items()}
        assert self._durable <= self._added
        assert self._bytes <= self._limit or min(self._held) >= self._durable

    def _make_room(self) -> None:
        while self._bytes > self._limit:
            oldest = next(iter(self._held))
            if oldest >= self._durable:
                break
            self._drop(oldest)

    def _drop(self, number: int) -> None:
        trajectory = self._held.pop(number)
        self._bytes -= trajectory.nbytes
        numbers = self._numbers[trajectory.session.group]
        del numbers[trajectory.session.index]
        if not numbers:
            del self._numbers[trajectory.session.group]
