"""Engines for tests of the pool that answer by rule, stall, die and refuse on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np

from perdure.core.errors import EngineLostError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import (
    NO_INCARNATION,
    EngineCapabilities,
    GenerationChunk,
    GenerationRequest,
    LossListener,
    SamplingParams,
)


def request_of(name: str = "r", *, budget: int = 10) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), SamplingParams(max_new_tokens=budget), (7, 0))


def expected(request: GenerationRequest) -> tuple[int, ...]:
    """Token t of every answer is 100 + t."""
    return tuple(range(100, 100 + request.sampling.max_new_tokens))


class RuleEngine:
    """Gives one token a turn of the event loop while ``flows``; every call is recorded.

    Attributes:
        flows: Clear: no token is given (a wedge); set: they flow.
        answers: Clear: verbs are not answered.
        wrong_digest: Loads end with another digest than asked for.
        load_error: Loads raise it.
    """

    def __init__(self, *, idle: bool = False) -> None:
        self.flows = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        if not idle:
            self.flows.set()
        self.wrong_digest = False
        self.load_error: Exception | None = None
        self.calls: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.version = PolicyVersion(-1)
        self.incarnation = NO_INCARNATION
        self.undelivered_tokens = 0
        self.capabilities = EngineCapabilities(sleep_frees_memory=True, slots=8, max_tokens=64)
        self._live: dict[str, asyncio.Future[Exception | None]] = {}
        self._told: list[LossListener] = []

    def on_loss(self, tell: LossListener) -> None:
        self._told.append(tell)

    def die(self, *, undelivered: int = 0) -> None:
        """As a process that is killed: all that was sent has arrived, then every stream ends."""
        self.undelivered_tokens = undelivered
        error = EngineLostError("the engine died", where="rule engine")
        for end in self._live.values():
            if not end.done():
                end.set_result(error)
        for tell in self._told:
            tell(error)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        self.requests.append(request)
        end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._live[request.request_id] = end
        try:
            budget = request.sampling.max_new_tokens
            for t in range(len(request.prefix_ids), budget):
                if await self._ended(end):
                    yield self._chunk((), StopReason.ABORTED)
                    return
                yield self._chunk((100 + t,), StopReason.LENGTH if t == budget - 1 else None)
        finally:
            del self._live[request.request_id]

    async def _ended(self, end: asyncio.Future[Exception | None]) -> bool:
        """Wait for a token or the end. Raises what ended the stream."""
        flow = asyncio.ensure_future(self.flows.wait())
        try:
            await asyncio.sleep(0)
            await asyncio.wait([flow, end], return_when=asyncio.FIRST_COMPLETED)
        finally:
            flow.cancel()
        if not end.done():
            return False
        if error := end.result():
            raise error
        return True

    def _chunk(self, tokens: tuple[int, ...], reason: StopReason | None) -> GenerationChunk:
        logprobs = -np.ones(len(tokens), np.float32)
        return GenerationChunk(np.array(tokens, np.int32), logprobs, self.version, reason)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        await self._answer("abort")
        ids = list(self._live) if request_ids is None else request_ids
        chosen = [self._live[key] for key in ids if key in self._live]
        chosen = [end for end in chosen if not end.done()]
        for end in chosen:
            end.set_result(None)
        return len(chosen)

    async def pause(self) -> None:
        await self._answer("pause")

    async def resume(self) -> None:
        await self._answer("resume")

    async def sleep(self) -> None:
        await self._answer("sleep")

    async def wake(self) -> None:
        await self._answer("wake")

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Mapping[str, Any],
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        await self._answer("load_weights")
        if self.load_error is not None:
            raise self.load_error
        self.version, self.incarnation = version, incarnation
        return "wrong" if self.wrong_digest else str(weights["digest"])

    async def close(self) -> None:
        self.calls.append("close")

    async def _answer(self, verb: str) -> None:
        self.calls.append(verb)
        await self.answers.wait()
