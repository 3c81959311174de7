"""What runs on a node of the cluster: an embedded engine that outlives its controller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ray.actor import exit_actor
from ray.util import get_current_placement_group

from perdure.core.errors import FencedError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import (
    GenerationChunk,
    GenerationRequest,
    WeightFile,
)
from perdure.models import ModelConfig, digest_weights
from perdure.rollout import EmbeddedEngine, EngineOptions, compute_with
from perdure.runtime.ray.places import give_back

_END_TIMEOUT_S = 1.0


class EngineHost:
    """An embedded engine behind calls. The event loop is the actor's.

    Args:
        threads: That it computes with.
        incarnation: Of the controller that makes it.
        orphan_timeout_s: It ends when no controller has called it for so long.

    Every call that changes anything says whose it is. Raises ``FencedError``: a higher incarnation
    has the engine.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        options: EngineOptions,
        *,
        threads: int,
        incarnation: IncarnationNumber,
        orphan_timeout_s: float,
    ) -> None:
        compute_with(threads)
        self._engine = EmbeddedEngine(model_config, options)
        self._owner = incarnation
        self._attached = False
        self._called = False
        self._watch_for_calls(orphan_timeout_s)

    async def attach(self, incarnation: IncarnationNumber, orphan_timeout_s: float) -> bool:
        """A controller takes the engine over: what an earlier one has asked for ends.

        From now on it ends when no controller has called it for ``orphan_timeout_s``. Returns
        whether it was there before, for another controller.
        """
        self._require_owner(incarnation)
        self._owner = incarnation
        was_there, self._attached = self._attached, True
        self._watch.cancel()
        self._watch_for_calls(orphan_timeout_s)
        await self._engine.abort()
        await self._engine.wake()
        await self._engine.resume()
        return was_there

    async def end(self, incarnation: IncarnationNumber) -> None:
        """The process ends, without an answer: as Ray wants it, or after a second anyhow."""
        self._require_owner(incarnation)
        asyncio.get_running_loop().call_later(_END_TIMEOUT_S, os._exit, 0)
        # Ray lets calls that run come to their end.
        await self._engine.abort()
        exit_actor()

    def _require_owner(self, incarnation: IncarnationNumber) -> None:
        if incarnation < self._owner:
            raise FencedError(
                f"the engine belongs to incarnation {self._owner}",
                where=f"incarnation {incarnation}",
                rule="an engine serves the highest incarnation of its run",
                way_out="another process goes on with the run; end this one",
            )

    async def pid(self) -> int:
        """Of the process it runs in."""
        return os.getpid()

    async def ping(self) -> int:
        """A sign of life: tokens decoded and not delivered."""
        self._called = True
        return self._engine.undelivered_tokens

    async def generate(
        self, incarnation: IncarnationNumber, request: GenerationRequest
    ) -> AsyncGenerator[GenerationChunk]:
        self._require_owner(incarnation)
        async for chunk in self._engine.generate(request):
            yield chunk

    async def abort(self, incarnation: IncarnationNumber, request_ids: Sequence[str] | None) -> int:
        self._require_owner(incarnation)
        return await self._engine.abort(request_ids)

    async def pause(self, incarnation: IncarnationNumber) -> None:
        self._require_owner(incarnation)
        await self._engine.pause()

    async def resume(self, incarnation: IncarnationNumber) -> None:
        self._require_owner(incarnation)
        await self._engine.resume()

    async def sleep(self, incarnation: IncarnationNumber) -> None:
        self._require_owner(incarnation)
        await self._engine.sleep()

    async def wake(self, incarnation: IncarnationNumber) -> None:
        self._require_owner(incarnation)
        await self._engine.wake()

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Mapping[str, Any] | WeightFile,
        incarnation: IncarnationNumber,
    ) -> str:
        self._require_owner(incarnation)
        return await self._engine.load_weights(version, weights, incarnation=incarnation)

    async def keep_weights(
        self, version: PolicyVersion, digest: str, incarnation: IncarnationNumber
    ) -> str | None:
        """Go on with what it holds, if that has the digest; None: it does not.

        The digest is taken of what lies in memory now.
        """
        self._require_owner(incarnation)
        held = self._engine.held_weights
        if not held or digest_weights(held) != digest:
            return None
        return await self._engine.load_weights(version, held, incarnation=incarnation)

    def _watch_for_calls(self, timeout_s: float) -> None:
        watch = self._end_if_orphaned(timeout_s)
        self._watch = asyncio.get_running_loop().create_task(watch)

    async def _end_if_orphaned(self, timeout_s: float) -> None:
        """Runs until no controller has called for too long; then the process ends."""
        called = True
        while called:
            self._called = False
            await asyncio.sleep(timeout_s)
            called = self._called
        try:
            if (group := get_current_placement_group()) is not None:
                # Its engines have all had the same controller.
                await give_back(group, incarnation=self._owner)
        finally:
            os._exit(0)
