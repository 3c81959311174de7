"""What runs on a node of the cluster: an embedded engine that outlives its controller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ray.util import get_current_placement_group, remove_placement_group

from perdure.core.errors import FencedError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import (
    NO_INCARNATION,
    GenerationChunk,
    GenerationRequest,
    WeightFile,
)
from perdure.models import ModelConfig, digest_weights
from perdure.rollout import EmbeddedEngine, EngineOptions, compute_with


class EngineHost:
    """An embedded engine behind calls. The event loop is the actor's.

    Args:
        threads: That it computes with.
        orphan_timeout_s: It ends when no controller has called it for so long.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        options: EngineOptions,
        *,
        threads: int,
        orphan_timeout_s: float,
    ) -> None:
        compute_with(threads)
        self._engine = EmbeddedEngine(model_config, options)
        self._owner = NO_INCARNATION
        self._orphan_timeout_s = orphan_timeout_s
        self._called = False
        self._watch: asyncio.Task[None] | None = None

    async def attach(self, incarnation: IncarnationNumber) -> bool:
        """A controller takes the engine over: what an earlier one has asked for ends.

        Returns whether it was there before, for another controller. Raises ``FencedError``: a
        higher incarnation has it.
        """
        if incarnation < self._owner:
            raise FencedError(
                f"the engine belongs to incarnation {self._owner}",
                where=f"incarnation {incarnation}",
                rule="an engine serves the highest incarnation of its run",
                way_out="another process goes on with the run; end this one",
            )
        self._owner = incarnation
        was_there = self._watch is not None
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._end_if_orphaned())
        await self._engine.abort()
        await self._engine.wake()
        await self._engine.resume()
        return was_there

    async def belongs_to(self, incarnation: IncarnationNumber) -> bool:
        """Whether no higher one has taken it over."""
        return incarnation >= self._owner

    async def pid(self) -> int:
        """Of the process it runs in."""
        return os.getpid()

    async def ping(self) -> int:
        """A sign of life: tokens decoded and not delivered."""
        self._called = True
        return self._engine.undelivered_tokens

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        async for chunk in self._engine.generate(request):
            yield chunk

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        return await self._engine.abort(request_ids)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Mapping[str, Any] | WeightFile,
        incarnation: IncarnationNumber,
    ) -> str:
        return await self._engine.load_weights(version, weights, incarnation=incarnation)

    async def keep_weights(
        self, version: PolicyVersion, digest: str, incarnation: IncarnationNumber
    ) -> str | None:
        """Go on with what it holds, if that has the digest; None: it does not.

        The digest is taken of what lies in memory now.
        """
        held = self._engine.held_weights
        if not held or digest_weights(held) != digest:
            return None
        return await self._engine.load_weights(version, held, incarnation=incarnation)

    async def _end_if_orphaned(self) -> None:
        """Runs until no controller has called for too long; then the process ends."""
        called = True
        while called:
            self._called = False
            await asyncio.sleep(self._orphan_timeout_s)
            called = self._called
        group = get_current_placement_group()
        if group is not None:
            # Its engines have all had the same controller.
            remove_placement_group(group)
        os._exit(0)
