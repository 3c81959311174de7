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

import numpy as np
import torch

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
    Weights,
)
from perdure.core.trajectories import RewardedGroup
from perdure.learner.api import Example, LocalUpdateResult
from perdure.models import digest_weights

CHUNK = 4


def token_of(key: Sequence[int], place: int, version: int) -> int:
    """The token at ``place`` of the stream ``key`` under the weights of ``version``."""
    text = f"{tuple(key)} {place} {version}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=2).digest()) % 7


@dataclass
class EngineTraits:
    """How an engine behaves. ``length`` gives the tokens of a request by its random key."""

    token_s: Callable[[], float]
    length: Callable[[Sequence[int]], int]
    wrong_digests: int = 0
    """So many of its next acknowledgements are wrong."""


@dataclass
class _Live:
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class FakeEngine:
    """A rollout engine of the simulation; tokens cost virtual time."""

    def __init__(self, traits: EngineTraits, max_tokens: int) -> None:
        self.traits = traits
        self.version = PolicyVersion(-1)
        self.undelivered_tokens = 0
        self.dead = False
        self._max_tokens = max_tokens
        self._live: dict[str, _Live] = {}
        self._paused = False
        self._has_weights = False
        self._listeners: list[LossListener] = []
        self._highest = NO_INCARNATION

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(sleep_frees_memory=True, slots=64, max_tokens=self._max_tokens)

    def on_loss(self, tell: LossListener) -> None:
        self._listeners.append(tell)

    def die(self) -> None:
        """As a killed process: streams end, the owner is told."""
        if self.dead:
            return
        self.dead = True
        for live in self._live.values():
            live.wake.set()
        for tell in self._listeners:
            tell(EngineLostError("the engine was killed", where="simulation"))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        self._check()
        live = self._live[request.request_id] = _Live()
        try:
            while self._paused and not live.aborted:
                await live.wake.wait()
                live.wake.clear()
                self._check()
            length = min(self.traits.length(request.random_key), request.sampling.max_new_tokens)
            place = len(request.prefix_ids)
            while True:
                count = min(CHUNK, length - place)
                await self._spend(live, count * self.traits.token_s())
                if live.aborted:
                    yield self._chunk([], StopReason.ABORTED)
                    return
                tokens = [
                    token_of(request.random_key, place + i, self.version) for i in range(count)
                ]
                place += count
                ended = place >= length
                full = place >= request.sampling.max_new_tokens
                reason = StopReason.LENGTH if full else StopReason.STOP
                yield self._chunk(tokens, reason if ended else None)
                if ended:
                    return
        finally:
            self._live.pop(request.request_id, None)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        self._check()
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
        self._check()
        self._paused = True

    async def resume(self) -> None:
        self._check()
        self._paused = False
        for live in self._live.values():
            live.wake.set()

    async def sleep(self) -> None:
        self._check()
        self._has_weights = False

    async def wake(self) -> None:
        self._check()

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Weights,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        self._check()
        assert incarnation >= self._highest, "a zombie has published"
        self._highest = incarnation
        await asyncio.sleep(self.traits.token_s())
        self._check()
        self._has_weights = True
        self.version = version
        if self.traits.wrong_digests:
            self.traits.wrong_digests -= 1
            return "garbled"
        return digest_weights(dict(weights))

    async def close(self) -> None:
        self.dead = True

    async def _spend(self, live: _Live, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not (live.aborted or self.dead):
                    live.wake.clear()
                    await live.wake.wait()
        except TimeoutError:
            pass
        self._check()

    def _chunk(self, tokens: list[int], reason: StopReason | None) -> GenerationChunk:
        ids = np.array(tokens, np.int32)
        return GenerationChunk(ids, np.full(len(ids), -1.0, np.float32), self.version, reason)

    def _check(self) -> None:
        if self.dead:
            raise EngineLostError("the engine was killed", where="simulation")


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

    def length(key: Sequence[int]) -> int:
        rng = generator(seed, "length", *key)
        return int(min(1 + rng.pareto(1.1) * 4, longest))

    return length
