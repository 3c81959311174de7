"""The engines of a run on a cluster: placed, found after a crash, given back at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup

from perdure.core.errors import FencedError, InfrastructureError
from perdure.models import ModelConfig
from perdure.rollout import EngineOptions
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.ray.cluster import PoolPlan, head_address
from perdure.runtime.ray.head import answers, require_head, watch_head
from perdure.runtime.ray.object_store import ObjectTransport
from perdure.runtime.ray.placement import Placement
from perdure.runtime.ray.places import give_back, reserve
from perdure.runtime.ray.ray_engine import RayEngine
from perdure.runtime.waits import waiting


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """How the engines of a run are started and watched.

    Attributes:
        threads: That each computes with.
        start_timeout_s: Longest wait for the first answer of one.
        heartbeat_s: Between two signs of life, of an engine and of the head.
        silence_timeout_s: Without one for so long (and a tenth more) it counts as gone.
        place_timeout_s: Longest wait for cores that others hold.
        orphan_timeout_s: An engine ends when no controller has called it for so long.
    """

    threads: int
    start_timeout_s: float
    heartbeat_s: float
    silence_timeout_s: float
    place_timeout_s: float
    orphan_timeout_s: float


class EngineActors:
    """``runtime.fleet.EngineSource`` on the cluster that this process has joined.

    Args:
        parts: Of the incarnation that they serve.
        names: One for each engine of the plan.
    """

    def __init__(
        self,
        model: ModelConfig,
        options: EngineOptions,
        parts: RuntimeParts,
        *,
        names: Sequence[str],
        plan: PoolPlan,
        settings: ActorOptions,
    ) -> None:
        self.names = names
        self._model = model
        self._options = options
        self._run_id = parts.store.run.run_id
        self._store = parts.store
        self._events = parts.events
        self._clock = parts.clock
        self._plan = plan
        self._settings = settings
        self._head = head_address()
        self._group: PlacementGroup | None = None
        self._reserving = asyncio.Lock()
        self._started: list[RayEngine] = []
        self._refused = False

    def transport(self) -> ObjectTransport:
        return ObjectTransport(head=self._head, timeout_s=self._settings.silence_timeout_s)

    async def start(self, name: str) -> RayEngine:
        settings = self._settings
        # To look a name up holds the event loop until the head answers.
        await require_head(self._head, timeout_s=settings.silence_timeout_s)
        place = Placement(
            f"perdure-{self._run_id}-{name}",
            group=await self._places(),
            bundle=self.names.index(name),
            cpus=self._plan.cpus_per_engine,
            threads=settings.threads,
            heartbeat_s=settings.heartbeat_s,
            silence_timeout_s=settings.silence_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            orphan_timeout_s=settings.orphan_timeout_s,
        )
        try:
            with self._waiting(f"{name} to start on the cluster", at_once=False):
                engine = await RayEngine.start(
                    self._model,
                    self._options,
                    place,
                    incarnation=self._store.incarnation,
                    has_run=self._has_run,
                )
        except FencedError:
            self._refused = True
            raise
        self._started.append(engine)
        try:
            if engine.was_there:
                self._events("engine_found", {"engine": name, "pid": await engine.pid()})
        except BaseException:
            await engine.close()
            raise
        return engine

    def _has_run(self) -> bool:
        """Whether no engine and no claim speaks of a higher incarnation."""
        fenced = self._refused or any(engine.is_anothers for engine in self._started)
        return not fenced and self._store.is_highest

    async def watch(self) -> None:
        settings = self._settings
        await watch_head(
            self._head,
            interval_s=settings.heartbeat_s,
            timeout_s=settings.silence_timeout_s,
            clock=self._clock,
        )

    async def close(self) -> None:
        """Give the places back, unless a higher incarnation may have taken the engines over."""
        if self._group is None:
            return
        # With the head, the places are gone as well.
        limit_s = self._settings.silence_timeout_s
        there = await asyncio.to_thread(answers, self._head, timeout_s=limit_s)
        if not there or not self._has_run():
            return
        try:
            await give_back(self._group, incarnation=self._store.incarnation)
        except InfrastructureError as error:
            # What the run ends with counts, and a resume takes the places over.
            message = f"the places on the cluster could not be given back: {error}"
            self._events("warning", {"message": message})

    async def _places(self) -> PlacementGroup:
        async with self._reserving:
            if self._group is None:
                with self._waiting(f"{self._plan.cpus} CPUs of the cluster"):
                    self._group = await reserve(
                        self._run_id,
                        self._plan,
                        incarnation=self._store.incarnation,
                        timeout_s=self._settings.place_timeout_s,
                    )
            return self._group

    def _waiting(self, what: str, *, at_once: bool = True) -> AbstractContextManager[None]:
        return waiting(what, clock=self._clock, events=self._events, at_once=at_once)
