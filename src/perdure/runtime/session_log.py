"""What sessions have for the log, put together for many of them.

A record for each token of each session would cost more CPU than the tokens: whatever has come
together when the time is up is appended in one go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from perdure.core.experience_records import GroupSettled, ToolResult
from perdure.core.ids import SessionId
from perdure.experience import ExperienceStore, FinishedSession
from perdure.runtime.acknowledge import everything_acknowledged
from perdure.runtime.trajectory_builder import TrajectoryBuilder

_LOGGED_TOGETHER = 128
"""At most so many finished sessions wait to be logged in one go, which costs far less CPU than
logging them one by one between the kernels of a model."""
_PARTIAL_LINGER_S = 0.25
"""How long the tokens of unfinished sessions, for which nobody waits, are collected."""


class SessionLog:
    """Collects and appends, in this order: partial tokens, tool results, finished sessions.

    So a result is never durable without the tokens that asked for it. Belongs to one event loop.
    """

    def __init__(self, store: ExperienceStore) -> None:
        self._store = store
        self._growing: dict[SessionId, TrajectoryBuilder] = {}
        self._results: list[ToolResult] = []
        self._finished: list[FinishedSession] = []
        self._settled: list[GroupSettled] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.on_settled: Callable[[int], None] | None = None
        """Told how many groups were settled, after they have been logged."""

    def grown(self, builder: TrajectoryBuilder) -> None:
        """Tokens of an unfinished session are to be logged: all that it has by then."""
        self._growing[builder.session] = builder
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_PARTIAL_LINGER_S, self._due.set)

    def forget(self, session: SessionId) -> None:
        """Its tokens are not to be logged any more."""
        self._growing.pop(session, None)

    async def result(self, record: ToolResult) -> None:
        """Journal the result of a call; returns when it is durable, and may be used.

        Raises:
            FencedError, StorageError: As the log says.
        """
        self._results.append(record)
        await asyncio.sleep(0)  # what others have at this moment goes along
        if self._results:
            self.flush()
        await everything_acknowledged(self._store)

    async def durable(self) -> None:
        """Return when all that was put in is durable. Raises as :meth:`result`."""
        self.flush()
        await everything_acknowledged(self._store)

    def finished(self, session: FinishedSession) -> None:
        """A session is done."""
        self.forget(session.trajectory.session)
        self._finished.append(session)
        self._due.set()
        if len(self._finished) >= _LOGGED_TOGETHER:
            self.flush()

    def settled(self, record: GroupSettled) -> None:
        """A group is terminal."""
        self._settled.append(record)
        self._due.set()

    def flush(self) -> None:
        """Append what has come together since the last time.

        Nobody waits for this append alone: a failure is final and surfaces at a later call.
        """
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._append_partials()
        results, self._results = self._results, []
        for record in results:
            self._store.tool_result(record)
        finished, self._finished = self._finished, []
        settled, self._settled = self._settled, []
        if finished or settled:
            self._store.sessions_done(finished, settled=settled)
        if settled and self.on_settled is not None:
            self.on_settled(len(settled))

    def _append_partials(self) -> None:
        growing = [b for b in self._growing.values() if b.length > b.logged]
        self._growing.clear()
        if growing:
            self._store.partials([builder.unlogged() for builder in growing])
            for builder in growing:
                builder.note_logged()

    async def run(self, linger_s: float) -> NoReturn:
        """Append what comes, ``linger_s`` after the first of it at the latest.

        Produces log records; waits for sessions. Runs until it is cancelled, which leaves what is
        not appended yet for :meth:`flush`.
        """
        while True:
            await self._due.wait()
            await asyncio.sleep(linger_s)
            self.flush()
