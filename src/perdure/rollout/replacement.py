"""Replaces lost engines of a pool: within a budget, with back-off, weights before traffic."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection

from perdure.core.errors import EngineLostError
from perdure.core.events import EventSink, ignore_events
from perdure.core.rollout_api import RolloutEngine
from perdure.rollout.embedded import NO_VERSION
from perdure.rollout.members import MemberReport, MemberState
from perdure.rollout.options import ReplacementOptions
from perdure.rollout.pool import EnginePool

_IDLE = (MemberState.QUARANTINED, MemberState.LOST)


class Replacements:
    """Watches a pool; :meth:`run` belongs into a task group of the pool's owner.

    Args:
        pool: Whose losses are made good.
        build: Starts an engine for a name; raises ``EngineLostError`` if that fails.
        catch_up: Brings the current weights to the new member; returns whether it serves. Before
            the first publication it does not, and gets its weights with that.
        names: Engines that are replaced; None: all.
        options: Budget and back-off.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        build: Callable[[str], Awaitable[RolloutEngine]],
        catch_up: Callable[[str], Awaitable[bool]],
        names: Collection[str] | None = None,
        options: ReplacementOptions | None = None,
        events: EventSink = ignore_events,
    ) -> None:
        self._pool = pool
        self._build = build
        self._catch_up = catch_up
        self._names = names
        self._options = options or ReplacementOptions()
        self._events = events
        self._spent: dict[str, deque[float]] = {}
        self._given_up: set[str] = set()
        self._making_good = 0
        self._settled = asyncio.Event()

    async def nobody_comes(self) -> None:
        """Wait until no lost engine is on its way back, weights and all."""
        while self._making_good or any(map(self._may_come_back, self._awaited())):
            await self._settled.wait()

    async def run(self) -> None:
        """Replace what gets lost. Runs until cancelled; half-started engines are closed then.

        Raises:
            EngineLostError: Engines are lost, the budget of each is spent, and nobody else serves.
            RuntimeError: The pool was closed.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                name = await self._pool.next_loss()
                reason = {each.name: each.reason for each in self._pool.describe()}.get(name, "")
                self._events("engine_lost", {"engine": name, "reason": reason})
                tasks.create_task(self._make_good(name, reason))

    async def _make_good(self, name: str, reason: str) -> None:
        """Let who is left serve if need be, and replace the lost one."""
        self._making_good += 1
        await self._readmit()
        if self._is_ours(name):
            await self._replace(name, reason)
        self._making_good -= 1
        self._settled.set()
        self._settled.clear()

    async def _readmit(self) -> None:
        """If nobody serves, offer the current weights again to those who have not acknowledged."""
        if any(each.state not in _IDLE for each in self._pool.describe()):
            return
        for each in self._pool.describe():
            if each.state is MemberState.QUARANTINED:
                # It may be lost meanwhile: then its own loss is told.
                with contextlib.suppress(EngineLostError):
                    await self._catch_up(each.name)

    async def _replace(self, name: str, reason: str) -> None:
        began_s = asyncio.get_running_loop().time()
        engine = None
        while engine is None:
            if not await self._may_try(name):
                await self._give_up(name, reason)
                return
            try:
                engine = await self._build(name)
            except EngineLostError as error:
                reason = str(error)
        try:
            self._pool.add(name, engine)
        except BaseException:
            await engine.close()
            raise
        serves = await self._catch_up(name)
        seconds = asyncio.get_running_loop().time() - began_s
        self._events("engine_replaced", {"engine": name, "seconds": seconds, "serves": serves})

    async def _may_try(self, name: str) -> bool:
        """Wait as long as the tries so far ask for; False: the budget is spent."""
        options, loop = self._options, asyncio.get_running_loop()
        spent = self._spent.setdefault(name, deque())
        while spent and spent[0] <= loop.time() - options.window_s:
            spent.popleft()
        if len(spent) >= options.max_replacements:
            return False
        if spent:
            backoff_s = options.backoff_s * 2.0 ** (len(spent) - 1)
            await asyncio.sleep(min(backoff_s, options.max_backoff_s))
        spent.append(loop.time())
        return True

    async def _give_up(self, name: str, reason: str) -> None:
        self._events("engine_not_replaced", {"engine": name, "reason": reason})
        self._given_up.add(name)
        await self._readmit()
        # A lost one may be on its way back, and a new one waits for its first weights.
        left = self._awaited()
        if all(e.state is MemberState.QUARANTINED and e.version != NO_VERSION for e in left):
            others = "".join(f"; {each}" for each in left)
            raise EngineLostError(
                f"the last engine, {name!r}, is lost: {reason}{others}",
                where="engine pool",
                rule=f"max_replacements = {self._options.max_replacements} "
                f"within {self._options.window_s:g} s",
                way_out="mend what kills the engines, then resume the run",
            )

    def _is_ours(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _may_come_back(self, engine: MemberReport) -> bool:
        return engine.state is MemberState.LOST and self._is_ours(engine.name)

    def _awaited(self) -> list[MemberReport]:
        """The engines that are not given up."""
        return [each for each in self._pool.describe() if each.name not in self._given_up]
