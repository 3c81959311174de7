"""Trajectories at hand: those that are not durable yet, and the newest others within a bound."""

from __future__ import annotations

from perdure.core.ids import GroupId, SessionId
from perdure.core.trajectories import Trajectory


class TrajectoryCache:
    """Drops the oldest durable trajectories above ``limit_bytes`` of arrays.

    What is not durable stays whatever the limit; the log bounds how much that can be.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._held: dict[GroupId, dict[int, Trajectory]] = {}
        self._droppable: dict[SessionId, None] = {}

    def add(self, trajectory: Trajectory) -> None:
        session = trajectory.session
        self._held.setdefault(session.group, {})[session.index] = trajectory
        self._bytes += _bytes(trajectory)
        self._make_room()

    def get(self, session: SessionId) -> Trajectory | None:
        return self._held.get(session.group, {}).get(session.index)

    def allow_drop(self, session: SessionId) -> None:
        """The log has it: it may go when room is needed."""
        if self.get(session) is None:
            return
        self._droppable[session] = None
        self._make_room()

    def drop_group(self, group: GroupId) -> None:
        """Forget those trajectories of a group that are durable."""
        for index in list(self._held.get(group, {})):
            session = SessionId(group, index)
            if session in self._droppable:
                self._drop(session)

    def check(self) -> None:
        """Assert that the byte count and the order of dropping agree with what is held."""
        held = {t.session: _bytes(t) for part in self._held.values() for t in part.values()}
        assert sum(held.values()) == self._bytes
        assert self._droppable.keys() <= held.keys()
        assert all(self._held.values())
        assert self._bytes <= self._limit or not self._droppable

    def _make_room(self) -> None:
        while self._bytes > self._limit and self._droppable:
            self._drop(next(iter(self._droppable)))

    def _drop(self, session: SessionId) -> None:
        del self._droppable[session]
        group = self._held[session.group]
        self._bytes -= _bytes(group.pop(session.index))
        if not group:
            del self._held[session.group]


def _bytes(trajectory: Trajectory) -> int:
    arrays = (
        trajectory.prompt_ids_P,
        trajectory.response_ids_T,
        trajectory.logprobs_T,
        trajectory.loss_mask_T,
    )
    return sum(array.nbytes for array in arrays)
