"""Runs prompt groups in the background, and says when some have settled."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from perdure.core.ids import GroupId
from perdure.experience import GroupState
from perdure.runtime.sessions import SessionRunner

_LINGER_S = 0.02
"""How long a finished session waits for others at most, before it is logged."""
_OPEN = (GroupState.PENDING, GroupState.RUNNING)


class Dispatcher:
    """Hands open groups to a session runner, oldest first, at most ``max_sessions()`` at once.

    A group is started as a whole, so that a few more may run. Belongs to one event loop.
    """

    def __init__(self, sessions: SessionRunner, *, max_sessions: Callable[[], int]) -> None:
        self.sessions = sessions
        self._store = sessions.store
        self._max_sessions = max_sessions
        self._running_sessions = 0
        self._known: set[GroupId] = set()
        self._waiting: list[GroupId] = []
        self._cursor = 0
        self._work = asyncio.Event()
        self._news = asyncio.Event()
        self._settled = 0
        sessions.log.on_settled = self._count
        sessions.on_session_end = self._session_ended

    @property
    def settled(self) -> int:
        """Groups settled since the start."""
        return self._settled

    @property
    def running_sessions(self) -> int:
        """Sessions that were started and have not ended."""
        return self._running_sessions

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Dispatch while the body runs.

        Consumes pending and running groups of the store; produces what the session runner logs;
        waits for :meth:`notify`. A failure cancels the body and is raised. On leaving, what runs is
        cancelled: finished sessions are in the log, and of the others what they have.
        """
        try:
            async with asyncio.TaskGroup() as owner:
                tasks = [
                    owner.create_task(self._dispatch()),
                    owner.create_task(self.sessions.log.run(_LINGER_S)),
                ]
                try:
                    yield
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            self.sessions.log.flush()

    def notify(self) -> None:
        """There are new groups, or there is more room for them."""
        self._work.set()

    async def wait_for_settled(self, *, beyond: int, timeout_s: float) -> int:
        """Wait until more than ``beyond`` groups were settled, or so long; returns how many."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._settled <= beyond and loop.time() < deadline_s:
            self._news.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._news.wait()
            except TimeoutError:
                break
        return self._settled

    async def _dispatch(self) -> None:
        """Start groups as they come and as there is room. Runs until cancelled."""
        async with asyncio.TaskGroup() as groups:
            while True:
                self._look()
                while self._waiting and self._running_sessions < self._max_sessions():
                    group = self._store.open_group(heapq.heappop(self._waiting))
                    self._running_sessions += len(group.missing)
                    groups.create_task(self.sessions.run_group(group))
                await self._work.wait()
                self._work.clear()

    def _look(self) -> None:
        """Notice groups that are open and not known yet."""
        changes = self._store.changes(self._cursor)
        self._cursor = changes.cursor
        for group, state in changes.states.items():
            if state not in _OPEN:
                self._known.discard(group)
            elif group not in self._known:
                self._known.add(group)
                heapq.heappush(self._waiting, group)

    def _session_ended(self) -> None:
        self._running_sessions -= 1
        self._work.set()

    def _count(self, settled: int) -> None:
        self._settled += settled
        self._news.set()
