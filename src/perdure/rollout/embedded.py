"""The embedded rollout engine: PyTorch in this process, continuous batching, no server.

One asyncio task, owned by the engine, decodes while requests live and gives the event loop a turn
after every step; requests join and leave between steps. It runs the learner's own model code.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np

from perdure.core.errors import ConfigError, TrainingError
from perdure.core.ids import IncarnationNumber, PolicyVersion
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
from perdure.core.trajectories import Array
from perdure.models.transformer import ModelConfig
from perdure.models.weight_files import read_weights
from perdure.rollout.decoder import Decoder
from perdure.rollout.options import EngineOptions
from perdure.rollout.requests import check_incarnation, check_request, prefix_end
from perdure.rollout.slots import LiveRequest, SlotTable

NO_VERSION = PolicyVersion(-1)
"""Version of an engine that has never held weights."""
COUNTERS = 3


class EmbeddedEngine:
    """``core.rollout_api.RolloutEngine`` on a :class:`~perdure.models.Transformer` of its own.

    Args:
        model_config: Shape of the model.
        options: Slots, lengths, determinism.
        counters: uint64 (3,), kept up to date: tokens decoded, given to streams, and no longer
            wanted. Another process may read them.

    Raises:
        ConfigError: ``max_tokens`` exceeds the model's ``max_positions``.
    """

    def __init__(
        self, model_config: ModelConfig, options: EngineOptions, *, counters: Array | None = None
    ) -> None:
        if options.max_tokens > model_config.max_positions:
            raise ConfigError(
                f"max_tokens {options.max_tokens} exceeds max_positions "
                f"{model_config.max_positions}",
                where="rollout.max_tokens",
                rule="a request must fit into the model's positions",
                way_out="lower max_tokens or raise the model's max_positions",
            )
        self._config = model_config
        self._options = options
        self._decoder: Decoder | None = Decoder(model_config, options)
        self._has_weights = False
        self._version = NO_VERSION
        self._table = self._new_table()
        self._waiting: deque[LiveRequest] = deque()
        self._live: dict[str, LiveRequest] = {}
        self._paused = False
        self._closed = False
        self._driver: asyncio.Task[None] | None = None
        self._counters = np.zeros(COUNTERS, np.uint64) if counters is None else counters
        self._incarnation = NO_INCARNATION

    def _new_table(self) -> SlotTable:
        return SlotTable(
            slots=self._options.slots,
            max_tokens=self._options.max_tokens,
            vocab_size=self._config.vocab_size,
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            sleep_frees_memory=True,
            slots=self._options.slots,
            max_tokens=self._options.max_tokens,
        )

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights last loaded; -1 before the first."""
        return self._version

    @property
    def undelivered_tokens(self) -> int:
        decoded, delivered, unwanted = self._counters.tolist()
        return decoded - delivered - unwanted

    def on_loss(self, tell: LossListener) -> None:
        """It lives and dies with this process: there is never anything to tell."""

    @property
    def held_weights(self) -> Mapping[str, Any]:
        """What it would serve, not copied; empty before the first weights and while asleep."""
        return {} if self._decoder is None or not self._has_weights else self._decoder.weights

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and cache held; 0 while asleep."""
        return 0 if self._decoder is None else self._decoder.memory_bytes

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        """Stream the answer; see the contract. The request begins with the first iteration.

        While the engine is paused the request waits at the door, even if the engine is asleep. A
        prefix that already ends (stop token or budget) is answered at once.
        """
        live = self._admit(request)
        try:
            ended = False
            while not ended:
                while not live.chunks:
                    if live.error is not None:
                        raise live.error
                    live.waiter = asyncio.get_running_loop().create_future()
                    await live.waiter
                chunk = live.chunks.popleft()
                ended = chunk.stop_reason is not None
                yield chunk
        finally:
            self._drop(live)
            unread = np.uint64(sum(len(chunk.token_ids) for chunk in live.chunks))
            self._counters[1] -= unread
            self._counters[2] += unread

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (all when None), running or waiting; unknown ids are ignored."""
        ids = list(self._live) if request_ids is None else list(dict.fromkeys(request_ids))
        chosen = [self._live[key] for key in ids if key in self._live]
        for live in chosen:
            self._finish(live, StopReason.ABORTED)
        return len(chosen)

    async def pause(self) -> None:
        """Let no new request in (they wait); running ones go on."""
        self._paused = True

    async def resume(self) -> None:
        """Let requests in again; those that waited fail if there are no weights to serve them."""
        self._paused = False
        if self._waiting and not self._has_weights:
            self._fail(list(self._waiting), "it has no weights")
        self._start_driver()

    async def sleep(self) -> None:
        """Free weights and KV memory. Raises ``RuntimeError`` while requests are live.

        Requests that wait at a paused door hold no memory and do not hinder.
        """
        if len(self._live) > (len(self._waiting) if self._paused else 0):
            raise RuntimeError(
                f"cannot sleep while {len(self._live)} requests are live; abort them first"
            )
        self._decoder = None
        self._has_weights = False

    async def wake(self) -> None:
        """Restore memory; weights are absent until :meth:`load_weights`."""
        self._check_open()
        if self._decoder is None:
            self._decoder = Decoder(self._config, self._options)

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Weights,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        """Copy the weights in; see the contract."""
        self._check_open()
        self._incarnation = check_incarnation(incarnation, seen=self._incarnation)
        if self._decoder is None:
            raise RuntimeError("the engine is asleep; wake it before loading weights")
        if self._table.count:
            raise RuntimeError(
                f"cannot load weights while {self._table.count} requests are decoding; "
                "abort them or wait for them first"
            )
        if isinstance(weights, WeightFile):
            weights = read_weights(weights)
        digest = self._decoder.load_weights(weights)
        self._version = version
        self._has_weights = True
        return digest

    async def close(self) -> None:
        """End every stream with ``RuntimeError`` and free everything. Idempotent."""
        self._closed = True
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            await asyncio.wait([self._driver])
        self._fail(list(self._live.values()), "it was closed")
        self._decoder = None
        self._has_weights = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _admit(self, request: GenerationRequest) -> LiveRequest:
        self._check_open()
        if not (self._has_weights or self._paused):
            state = "is asleep" if self._decoder is None else "has no weights"
            raise RuntimeError(f"the engine {state}; call load_weights before generating")
        live = self._check_request(request)
        self._live[request.request_id] = live
        reason = prefix_end(request)
        if reason is not None:
            self._finish(live, reason)
        else:
            self._waiting.append(live)
            self._start_driver()
        return live

    def _check_request(self, request: GenerationRequest) -> LiveRequest:
        check_request(request)
        sampling, name = request.sampling, request.request_id
        if name in self._live:
            raise ValueError(f"request {name!r} is live already; ids are unique among live ones")
        if len(request.prompt_ids) + sampling.max_new_tokens > self._options.max_tokens:
            raise ValueError(
                f"request {name!r}: {len(request.prompt_ids)} prompt tokens and a budget of "
                f"{sampling.max_new_tokens} exceed the engine's {self._options.max_tokens}"
            )
        context = np.array(request.prompt_ids + request.prefix_ids, np.int64)
        if context.min() < 0 or context.max() >= self._config.vocab_size:
            raise ValueError(
                f"request {name!r}: token ids must lie in 0 … {self._config.vocab_size - 1}"
            )
        return LiveRequest(request, context, sampling.max_new_tokens - len(request.prefix_ids))

    def _start_driver(self) -> None:
        if self._has_work() and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    def _has_work(self) -> bool:
        return bool(self._table.count or (self._waiting and not self._paused))

    async def _drive(self) -> None:
        """Decode until nothing is left to do.

        Consumes waiting requests; produces chunks on their streams; waits for nothing but a turn of
        the event loop; cancellation and failure reach every live stream.
        """
        try:
            while self._has_work():
                self._step()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._fail(list(self._live.values()), "its decoding task was cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - every live stream raises it
            self._fail(list(self._live.values()), f"{type(error).__name__}: {error}", cause=error)
            self._table = self._new_table()
            if self._decoder is not None:
                self._decoder.clear()

    def _step(self) -> None:
        assert self._decoder is not None
        table = self._table
        if not self._options.deterministic:
            self._decoder.compact(table)
        if self._waiting and not self._paused:
            self._let_in(self._decoder)
        tokens_N, logprobs_N = self._decoder.step(table)
        self._counters[0] += table.count
        outcome = table.record(tokens_N, logprobs_N, chunk_tokens=self._options.chunk_tokens)
        for slot, ended, stopped in zip(outcome.due, outcome.ended, outcome.stopped, strict=True):
            live = table.requests[slot]
            assert live is not None
            if ended:
                self._finish(live, StopReason.STOP if stopped else StopReason.LENGTH)
            else:
                self._deliver(live, None)

    def _let_in(self, decoder: Decoder) -> None:
        free = self._table.free_slots()
        entering = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        for slot, live in zip(free, entering, strict=False):
            self._table.occupy(slot, live)
        decoder.prefill([(live.slot, live.context) for live in entering])

    def _deliver(self, live: LiveRequest, reason: StopReason | None) -> None:
        if live.slot >= 0:
            tokens, logprobs = self._table.take_undelivered(live.slot)
            self._counters[1] += len(tokens)
        else:
            tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        live.chunks.append(GenerationChunk(tokens, logprobs, self._version, reason))
        live.wake()

    def _finish(self, live: LiveRequest, reason: StopReason) -> None:
        self._deliver(live, reason)
        self._drop(live)

    def _drop(self, live: LiveRequest) -> None:
        """Forget a request, wherever it stands; does nothing the second time."""
        if self._live.get(live.request.request_id) is not live:
            return
        del self._live[live.request.request_id]
        if live.slot >= 0:
            unwanted = self._table.generated[live.slot] - self._table.delivered[live.slot]
            self._counters[2] += np.uint64(unwanted)
            self._table.release(live.slot)
        elif live in self._waiting:
            self._waiting.remove(live)

    def _fail(
        self, requests: Sequence[LiveRequest], why: str, *, cause: Exception | None = None
    ) -> None:
        for live in requests:
            text = f"request {live.request.request_id!r} failed in the rollout engine: {why}"
            live.error = RuntimeError(text) if cause is None else TrainingError(text)
            live.error.__cause__ = cause
            self._drop(live)
            live.wake()
