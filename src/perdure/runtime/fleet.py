"""The engines of a pool that live outside this process: started, watched, replaced, left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from perdure.core.events import EventSink
from perdure.core.rollout_api import RolloutEngine
from perdure.publish import Publication
from perdure.rollout import EnginePool, ReplacementOptions, Replacements


class EngineFleet:
    """Starts the engines of a pool and replaces those that are lost.

    Args:
        pool: They serve in it; it closes them.
        publication: Brings the weights to replacements.
        names: Of the engines.
        build: Starts the engine of a name; raises ``EngineLostError`` if that fails.
        options: How often they are replaced.
    """

    def __init__(
        self,
        pool: EnginePool,
        publication: Publication,
        *,
        names: Sequence[str],
        build: Callable[[str], Awaitable[RolloutEngine]],
        options: ReplacementOptions,
        events: EventSink,
    ) -> None:
        self._pool = pool
        self._names = names
        self._build = build
        self._replacements = Replacements(
            pool,
            build=build,
            catch_up=publication.catch_up,
            names=frozenset(names),
            options=options,
            events=events,
        )
        self._ready = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Start the engines beside the body, and replace what is lost until it ends.

        Raises:
            EngineLostError: An engine does not start, or the last one is lost and may not be
                replaced again; the body is cancelled.
        """
        async with asyncio.TaskGroup() as owner:
            task = owner.create_task(self._run())
            try:
                yield
            finally:
                task.cancel()

    async def nobody_comes(self) -> None:
        """Wait until no lost engine is on its way back, weights and all."""
        await self._replacements.nobody_comes()

    async def ready(self) -> None:
        """Wait until all engines have been started; each answers within its own deadline."""
        await self._ready.wait()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as starts:
            for name in self._names:
                starts.create_task(self._start(name))
        self._ready.set()
        await self._replacements.run()

    async def _start(self, name: str) -> None:
        self._pool.add(name, await self._build(name))
