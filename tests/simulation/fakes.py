"""Engine and learner of the simulation: no arithmetic, but everything it depends on.

A token is a function of its random key, its place and the policy version, so that every token of a
log says which weights it came from. Weights are a digest of all batches trained, in order, so that
two runs have the same weights exactly if they trained the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from mischief import GARBLED, LATE, SERVES_AFTER_LATE, SLOW, Witness

from perdure.core.components import Checkpointable, ComponentState
from perdure.core.errors import EngineLostError
from perdure.core.ids import IncarnationNumber, PolicyVersion, UpdateId
from perdure.core.keyed_random import generator
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import (
    NO_INCARNATION,
    EngineCapabilities,
    GenerationChunk,
    GenerationRequest,
    LossListener,
    WeightFile,
    Weights,
)
from perdure.core.trajectories import RewardedGroup
from perdure.learner.api import Example, LocalUpdateResult
from perdure.models import digest_weights
from perdure.publish import PublicationOptions

SLOTS = 12
ACKNOWLEDGE_TIMEOUT_S = PublicationOptions().acknowledge_timeout_s


def token_of(key: Sequence[int], place: int, version: int) -> int:
    """The token at ``place`` of the stream ``key`` under the weights of ``version``.

    Never one that ends an answer: those are as long as their engine's traits say.
    """
    text = f"{tuple(key)} {place} {version}".encode()
    return 2 + int.from_bytes(hashlib.blake2b(text, digest_size=2).digest()) % 7


@dataclass
class EngineTraits:
    """How an engine behaves.

    Attributes:
        token_s: Seconds for the next token.
        length: Tokens of a request by its random key.
        pace: How much longer a request takes than others, by its random key.
        load_s: Seconds for loading weights.
        prefill_s: From a slot to the first token.
        slots: Requests decoded at once; others wait.
        chunk: Tokens streamed together.
        wrong_digests: So many of its next acknowledgements are wrong.
        dies_asked: Whether it dies instead of answering that it pauses.
    """

    token_s: Callable[[], float]
    length: Callable[[Sequence[int]], int]
    pace: Callable[[Sequence[int]], float]
    load_s: Callable[[], float]
    prefill_s: float = 0.0
    slots: int = SLOTS
    chunk: int = 4
    wrong_digests: int = 0
    dies_asked: Callable[[], bool] = lambda: False


@dataclass
class _Live:
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class FakeEngine:
    """A rollout engine of the simulation; tokens cost virtual time.

    Args:
        witness: Is told of what befalls the engine, and of requests that it should not get.
        on_late: Called when it is about to acknowledge after the deadline.
    """

    def __init__(
        self,
        traits: EngineTraits,
        max_tokens: int,
        *,
        witness: Witness | None = None,
        on_late: Callable[[FakeEngine], None] | None = None,
    ) -> None:
        self.traits = traits
        self.version = PolicyVersion(-1)
        self.undelivered_tokens = 0
        self.dead = False
        self.wedged = False
        self._max_tokens = max_tokens
        self._live: dict[str, _Live] = {}
        self._busy = 0
        self._paused = False
        self._witness = witness or Witness()
        self._on_late = on_late
        self._has_weights = self._was_late = False
        self._listeners: list[LossListener] = []
        self._highest = NO_INCARNATION

    @property
    def capabilities(self) -> EngineCapabilities:
        slots = self.traits.slots
        return EngineCapabilities(sleep_frees_memory=True, slots=slots, max_tokens=self._max_tokens)

    def on_loss(self, tell: LossListener) -> None:
        self._listeners.append(tell)

    def die(self) -> None:
        """As a killed process: streams end, the owner is told."""
        if self.dead:
            return
        self.dead = True
        self._wake_all()
        for tell in self._listeners:
            tell(EngineLostError("the engine was killed", where="simulation"))

    def wedge(self) -> None:
        """From now on it answers nothing, and no stream of it goes on."""
        self.wedged = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        await self._answering()
        self._witness.require(
            self._has_weights, f"{request.request_id} came to an engine that held no weights"
        )
        if self._was_late:
            self._witness.seen[SERVES_AFTER_LATE] += 1
        live = self._live[request.request_id] = _Live()
        try:
            while (self._paused or self._busy >= self.traits.slots) and not live.aborted:
                await live.wake.wait()
                live.wake.clear()
                await self._answering()
            self._busy += 1
            try:
                async for chunk in self._decode(request, live):
                    yield chunk
            finally:
                self._busy -= 1
                self._wake_all()
        finally:
            self._live.pop(request.request_id, None)

    async def _decode(
        self, request: GenerationRequest, live: _Live
    ) -> AsyncGenerator[GenerationChunk]:
        traits = self.traits
        length = min(traits.length(request.random_key), request.sampling.max_new_tokens)
        pace = traits.pace(request.random_key)
        if pace > 1:
            self._witness.seen[SLOW] += 1
        place = len(request.prefix_ids)
        length = max(length, place)  # what tools say may be longer
        before_s = traits.prefill_s
        while True:
            count = min(traits.chunk, length - place)
            await self._spend(live, before_s + count * traits.token_s() * pace)
            before_s = 0.0
            if live.aborted:
                yield self._chunk([], StopReason.ABORTED)
                return
            tokens = [token_of(request.random_key, place + i, self.version) for i in range(count)]
            place += count
            ended = place >= length
            full = place >= request.sampling.max_new_tokens
            reason = StopReason.LENGTH if full else StopReason.STOP
            yield self._chunk(tokens, reason if ended else None)
            if ended:
                return

    def _wake_all(self) -> None:
        for live in self._live.values():
            live.wake.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        await self._answering()
        chosen = [
            live
            for key, live in self._live.items()
            if (request_ids is None or key in request_ids) and not live.aborted
        ]
        for live in chosen:
            live.aborted = True
            live.wake.set()
        return len(chosen)

    async def pause(self) -> None:
        await self._answering()
        if self.traits.dies_asked():
            self.die()
            self._check()
        self._paused = True

    async def resume(self) -> None:
        await self._answering()
        self._paused = False
        self._wake_all()

    async def sleep(self) -> None:
        await self._answering()
        self._has_weights = False

    async def wake(self) -> None:
        await self._answering()

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Weights,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        await self._answering()
        assert incarnation >= self._highest, "a zombie has published"
        self._highest = incarnation
        self._has_weights = False
        load_s = self.traits.load_s()
        await asyncio.sleep(load_s)
        await self._answering()
        self.version = version
        if self.traits.wrong_digests:
            self.traits.wrong_digests -= 1
            self._witness.seen[GARBLED] += 1
            return "garbled"
        self._has_weights = True
        self._was_late = load_s > ACKNOWLEDGE_TIMEOUT_S
        if self._was_late:
            self._witness.seen[LATE] += 1
            if self._on_late is not None:
                self._on_late(self)
        assert not isinstance(weights, WeightFile)
        return digest_weights(dict(weights))

    async def close(self) -> None:
        self.dead = True
        self._wake_all()

    async def _spend(self, live: _Live, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not (live.aborted or self.dead):
                    live.wake.clear()
                    await live.wake.wait()
        except TimeoutError:
            pass
        await self._answering()

    def _chunk(self, tokens: list[int], reason: StopReason | None) -> GenerationChunk:
        ids = np.array(tokens, np.int32)
        return GenerationChunk(ids, np.full(len(ids), -1.0, np.float32), self.version, reason)

    async def _answering(self) -> None:
        while self.wedged and not self.dead:
            await asyncio.Event().wait()
        self._check()

    def _check(self) -> None:
        if self.dead:
            raise EngineLostError("the engine was killed", where="simulation")


class CopyTransport:
    """Lays out copies, as a file would be, which engines may take long after."""

    async def lay_out(
        self, version: PolicyVersion, weights: Mapping[str, Any], *, incarnation: IncarnationNumber
    ) -> Weights:
        del version, incarnation
        return {name: tensor.clone() for name, tensor in weights.items()}

    async def drop_older(self) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is held."""


class _Tensors:
    """A component that is a tensor of numbers."""

    schema_version = 1

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def state(self) -> ComponentState:
        return ComponentState(tensors={"w": self._tensor})

    def load(self, state: ComponentState, schema_version: int) -> None:
        assert schema_version == 1
        self._tensor.copy_(torch.from_numpy(np.array(state.tensors["w"])))


def weights_after(
    before: Sequence[float], update: UpdateId, groups: Sequence[RewardedGroup]
) -> list[float]:
    """Weights as a digest of the weights before and of the whole batch."""
    digest = hashlib.blake2b(repr((list(before), update.key())).encode())
    for group in groups:
        digest.update(repr((group.group, group.rewards)).encode())
        for one in group.trajectories:
            digest.update(repr((one.session, one.stop_reason, one.segments)).encode())
            for array in (one.prompt_ids_P, one.response_ids_T, one.logprobs_T, one.loss_mask_T):
                digest.update(np.ascontiguousarray(array).tobytes())
    return [float(int.from_bytes(digest.digest()[i : i + 6])) for i in (0, 6)]


class FakeLearner:
    """A learner whose weights are the digest of what it trained."""

    def __init__(self) -> None:
        self.weights = torch.zeros(2, dtype=torch.float64)
        self._counters = torch.zeros(2, dtype=torch.int64)

    def set(self, weights: Sequence[float]) -> None:
        self.weights.copy_(torch.tensor(weights, dtype=torch.float64))

    @property
    def optimizer_step(self) -> int:
        return int(self._counters[0])

    @property
    def local_updates(self) -> int:
        return int(self._counters[1])

    def supervised_step(self, step: int, examples: Sequence[Example]) -> dict[str, float]:
        raise AssertionError("the simulation has no warm start")

    def begin_training(self) -> None:
        self._counters.zero_()

    def freeze_reference(self) -> None:
        pass

    def local_update(
        self, update: UpdateId, groups: Sequence[RewardedGroup], *, version: object = None
    ) -> LocalUpdateResult:
        self.set(weights_after(self.weights.tolist(), update, groups))
        self._counters += 1
        return LocalUpdateResult({"loss": 0.0})

    def policy_weights(self) -> Mapping[str, torch.Tensor]:
        return {"w": self.weights}

    def policy_digest(self) -> str:
        return digest_weights(self.policy_weights())

    def reference_digest(self) -> str:
        return ""

    def state_digest(self) -> str:
        return digest_weights({"w": self.weights, "c": self._counters.to(torch.float64)})

    def components(self) -> dict[str, Checkpointable]:
        return {
            "policy": _Tensors(self.weights),
            "optimizer": _Tensors(self._counters),
        }


def lengths(seed: int, longest: int) -> Callable[[Sequence[int]], int]:
    """Long-tailed lengths of answers, by random key."""

    @cache
    def length(key: Sequence[int]) -> int:
        rng = generator(seed, "length", *key)
        return int(min(1 + rng.pareto(1.1) * 4, longest))

    return length


def paces(seed: int, slow: float) -> Callable[[Sequence[int]], float]:
    """How much longer than others a request takes: some of them, a lot."""

    @cache
    def pace(key: Sequence[int]) -> float:
        return 30.0 if generator(seed, "pace", *key).random() < slow else 1.0

    return pace
