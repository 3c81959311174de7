"""What runs on a node of the cluster: an embedded engine that outlives its controller."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import GenerationChunk, GenerationRequest, WeightFile
from perdure.models import ModelConfig
from perdure.rollout import EmbeddedEngine, EngineOptions


class EngineHost:
    """An embedded engine behind calls. The event loop is the actor's."""

    def __init__(self, model_config: ModelConfig, options: EngineOptions) -> None:
        self._engine = EmbeddedEngine(model_config, options)

    async def attach(self) -> PolicyVersion:
        """A controller takes the engine over: what an earlier one has asked for ends.

        Returns the version of the weights held.
        """
        await self._engine.abort()
        await self._engine.resume()
        return self._engine.version

    async def pid(self) -> int:
        """Of the process it runs in."""
        return os.getpid()

    async def ping(self) -> int:
        """A sign of life: tokens decoded and not delivered."""
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
