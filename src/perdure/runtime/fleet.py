"""The engines of a pool that live outside this process: started, watched, replaced, left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from perdure.core.events import EventSink
from perdure.core.rollout_api import RolloutEngine
from perdure.publish import Publication, WeightTransport
from perdure.rollout import EnginePool, ReplacementOptions, Replacements


class EngineSource(Protocol):
    """Where the engines outside this process come from: what a runtime has to offer."""

    @property
    def names(self) -> Sequence[str]:
        """Of the engines that serve."""
        ...

    def transport(self) -> WeightTransport:
        """How weights reach them."""
        ...

    async def start(self, name: str) -> RolloutEngine:
        """An engine that answers: one that an earlier controller of the run has left, or a new one.

        Raises:
            EngineLostError: It does not start in time, or dies.
            FencedError: It belongs to a higher incarnation.
            ConfigError: There is no place for it.
        """
        ...

    async def watch(self) -> None:
        """Look after what all of them stand on; returns at once if that is this process.

        Raises:
            InfrastructureError: It is gone, and no engine can be started any more.
        """
        ...

    async def close(self) -> None:
        """Give back what engines had; they are closed already."""
        ...


class EngineFleet:
    """Starts the engines of a pool and replaces those that are lost.

    Args:
        pool: They serve in it; it closes them.
        publication: Brings the weights to replacements.
        source: Starts them.
        options: How often they are replaced.
    """

    def __init__(
        self,
        pool: EnginePool,
        publication: Publication,
        *,
        source: EngineSource,
        options: ReplacementOptions,
        events: EventSink,
    ) -> None:
        self._pool = pool
        self._source = source
        self._replacements = Replacements(
            pool,
            build=source.start,
            catch_up=publication.catch_up,
            names=frozenset(source.names),
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
            InfrastructureError: What all engines stand on is gone; likewise.
        """
        async with asyncio.TaskGroup() as owner:
            tasks = [owner.create_task(self._run()), owner.create_task(self._source.watch())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def nobody_comes(self) -> None:
        """Wait until no lost engine is on its way back, weights and all."""
        await self._replacements.nobody_comes()

    async def ready(self) -> None:
        """Wait until all engines have been started; each answers within its own deadline."""
        await self._ready.wait()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as starts:
            for name in self._source.names:
                starts.create_task(self._start(name))
        self._ready.set()
        await self._replacements.run()

    async def _start(self, name: str) -> None:
        self._pool.add(name, await self._source.start(name))
