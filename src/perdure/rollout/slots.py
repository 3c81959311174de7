"""Host-side bookkeeping of running requests, one row of every array per slot.

Legend: S slots, N rows decoded in a step, K stop tokens, T tokens of one request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from perdure.core import keyed_random
from perdure.core.rollout_api import GenerationChunk, GenerationRequest, SamplingParams
from perdure.core.trajectories import Array

BAND_ROWS = 16
"""Rows that attend to the same number of positions."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between ``generate`` and its last chunk.

    Attributes:
        context: int64, prompt and prefix.
        budget: Tokens it may still generate.
        chunks: Ready for its stream.
        waiter: Set while its stream waits.
        error: Ends the stream with an exception.
        slot: Where it decodes; -1 while it waits at the door.
    """

    request: GenerationRequest
    context: Array
    budget: int
    chunks: deque[GenerationChunk] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    error: Exception | None = None
    slot: int = -1

    def wake(self) -> None:
        """Let the stream look again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def uniforms(self) -> Array:
        """float64 (budget,): its random numbers, from the first token still to come."""
        seed, *numbers = self.request.random_key
        spent = len(self.request.prefix_ids)
        draws = keyed_random.generator(seed, "sampling", *numbers).random(spent + self.budget)
        return draws[spent:]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a decoded token meant for each row; row numbers in ascending order.

    Attributes:
        due: Rows with a chunk to deliver (ended ones included).
        ended: Per due row, whether it ended.
        stopped: Per due row, whether it ended by a stop token.
    """

    due: list[int]
    ended: list[bool]
    stopped: list[bool]


NOTHING_DUE = StepOutcome([], [], [])


class SlotTable:
    """Arrays over slots; all updates of one decode step are vectorized."""

    def __init__(self, *, slots: int, max_tokens: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.requests: list[LiveRequest | None] = [None] * slots
        self.live = np.zeros(slots, bool)
        self.token = np.zeros(slots, np.int64)
        self.position = np.zeros(slots, np.int64)
        self.generated = np.zeros(slots, np.int64)
        self.budget = np.zeros(slots, np.int64)
        self.delivered = np.zeros(slots, np.int64)
        self.temperature = np.ones(slots, np.float32)
        self.top_k = np.full(slots, vocab_size, np.int64)
        self.top_p = np.ones(slots, np.float64)
        self.greedy = np.zeros(slots, bool)
        self.stops_SK = np.full((slots, 1), -1, np.int64)
        self.uniforms_ST = np.zeros((slots, max_tokens), np.float64)
        self.tokens_ST = np.zeros((slots, max_tokens), np.int32)
        self.logprobs_ST = np.zeros((slots, max_tokens), np.float32)
        self.count = 0
        """Requests that hold a slot."""
        self.changes = 0
        """Grows whenever a row comes to mean another request."""
        self._rows = np.arange(slots)
        self._quiet_steps = 0
        """Steps for which no budget ends and no chunk fills; 0: not known."""
        self._no_stops = True
        self._may_have_holes = True

    def free_slots(self) -> list[int]:
        """Free slots, lowest first."""
        return np.flatnonzero(~self.live).tolist()

    def occupy(self, slot: int, live: LiveRequest) -> None:
        """Give a free slot to a request; its last context token is the next one to feed."""
        sampling = live.request.sampling
        self.requests[slot] = live
        live.slot = slot
        self.live[slot] = True
        self.count += 1
        self._change()
        self.token[slot] = live.context[-1]
        self.position[slot] = len(live.context) - 1
        self.generated[slot] = self.delivered[slot] = 0
        self.budget[slot] = live.budget
        self._set_sampling(slot, sampling)
        if sampling.temperature > 0:
            self.uniforms_ST[slot, : live.budget] = live.uniforms()

    def _set_sampling(self, slot: int, sampling: SamplingParams) -> None:
        greedy = sampling.temperature == 0
        self.greedy[slot] = greedy
        self.temperature[slot] = 1.0 if greedy else sampling.temperature
        cut_k = 0 < sampling.top_k < self.vocab_size and not greedy
        self.top_k[slot] = sampling.top_k if cut_k else self.vocab_size
        self.top_p[slot] = 1.0 if greedy else sampling.top_p
        stops = sampling.stop_token_ids
        missing = len(stops) - self.stops_SK.shape[1]
        if missing > 0:
            self.stops_SK = np.pad(self.stops_SK, ((0, 0), (0, missing)), constant_values=-1)
        self.stops_SK[slot] = -1
        self.stops_SK[slot, : len(stops)] = stops

    def release(self, slot: int) -> None:
        """Free a slot; a free row decodes harmlessly where the row count is constant."""
        live = self.requests[slot]
        assert live is not None
        assert live.slot == slot
        live.slot = -1
        self.requests[slot] = None
        self.live[slot] = False
        self._may_have_holes = True
        self.count -= 1
        self._change()
        self.token[slot] = self.position[slot] = self.generated[slot] = 0
        self._set_sampling(slot, SamplingParams())

    def compaction(self) -> tuple[list[int], list[int]]:
        """(targets, sources) that bring all live rows to the front.

        Targets ascend and every source lies behind its target: moved in order, none is overwritten
        before it is read.

        Rows stay sorted in bands of :data:`BAND_ROWS`: the rows of a band stand no earlier in their
        sequences than those of later bands. So a hole takes the furthest row of the next band, and
        so on; only the last row of all fills a hole of the last band. (Long prompts may break the
        order, which costs time and nothing else.)
        """
        if not self._may_have_holes:
            return [], []
        holes = np.flatnonzero(~self.live[: self._top()])
        self._may_have_holes = bool(len(holes))
        if not len(holes):
            return [], []
        place = np.where(self.live, self.position, -1)
        content = self._rows.copy()
        for hole in holes[::-1].tolist():
            self._fill(hole, place, content)
        moved = np.flatnonzero((content != self._rows) & (place >= 0))
        return moved.tolist(), content[moved].tolist()

    def _top(self) -> int:
        """One more than the highest live row."""
        return len(self.live) - int(self.live[::-1].argmax()) if self.count else 0

    def _fill(self, hole: int, place: Array, content: Array) -> None:
        """Fill a hole with the rows behind it; ``place`` is -1 where nothing is."""
        top = int(np.flatnonzero(place >= 0)[-1]) if (place >= 0).any() else -1
        while hole < top:
            start = (hole // BAND_ROWS + 1) * BAND_ROWS
            last_band = start > top
            source = top if last_band else start + int(place[start : start + BAND_ROWS].argmax())
            place[hole], content[hole] = place[source], content[source]
            place[source] = -1
            hole = source

    def move(self, targets: list[int], sources: list[int]) -> None:
        """Carry out :meth:`compaction`."""
        left = sorted(set(sources) - set(targets))
        for array in self._arrays():
            array[targets] = array[sources]
        self.live[left] = False
        self._change()
        moving = [self.requests[source] for source in sources]
        for slot in left:
            self.requests[slot] = None
        for target, live in zip(targets, moving, strict=True):
            assert live is not None
            live.slot = target
            self.requests[target] = live

    def _change(self) -> None:
        self.changes += 1
        self._quiet_steps = 0

    def _arrays(self) -> tuple[Array, ...]:
        return (
            self.live,
            self.token,
            self.position,
            self.generated,
            self.budget,
            self.delivered,
            self.temperature,
            self.top_k,
            self.top_p,
            self.greedy,
            self.stops_SK,
            self.uniforms_ST,
            self.tokens_ST,
            self.logprobs_ST,
        )

    def next_uniforms(self, rows: int) -> Array:
        """float64 (N,): each row's random number for the token to come."""
        return self.uniforms_ST[self._rows[:rows], self.generated[:rows]]

    def record(self, tokens_N: Array, logprobs_N: Array, *, chunk_tokens: int) -> StepOutcome:
        """Take over one decoded token per row."""
        rows = len(tokens_N)
        live, generated = self.live[:rows], self.generated[:rows]
        if not self._quiet_steps:
            self._look_ahead(rows, chunk_tokens)
        self.tokens_ST[self._rows[:rows], generated] = tokens_N
        self.logprobs_ST[self._rows[:rows], generated] = logprobs_N
        generated += live
        self.position[:rows] += live
        self.token[:rows] = tokens_N
        self._quiet_steps -= 1
        hits_NK = None if self._no_stops else self.stops_SK[:rows] == tokens_N[:, None]
        if self._quiet_steps and (hits_NK is None or not hits_NK.any()):
            return NOTHING_DUE
        stopped = np.zeros(rows, bool) if hits_NK is None else live & hits_NK.any(1)
        ended = stopped | (live & (generated >= self.budget[:rows]))
        due = np.flatnonzero(ended | (generated - self.delivered[:rows] >= chunk_tokens))
        return StepOutcome(due.tolist(), ended[due].tolist(), stopped[due].tolist())

    def _look_ahead(self, rows: int, chunk_tokens: int) -> None:
        """Count the steps in which only a stop token can make a row due."""
        live = self.live[:rows]
        to_end = self.budget[:rows] - self.generated[:rows]
        to_chunk = self.delivered[:rows] + chunk_tokens - self.generated[:rows]
        soonest = int(np.minimum(to_end, to_chunk)[live].min(initial=chunk_tokens))
        self._quiet_steps = max(1, soonest)
        self._no_stops = bool((self.stops_SK[:rows] < 0).all())

    def take_undelivered(self, slot: int) -> tuple[Array, Array]:
        """int32 (n,) tokens and float32 (n,) log-probabilities not handed out so far."""
        start, end = int(self.delivered[slot]), int(self.generated[slot])
        self.delivered[slot] = end
        self._quiet_steps = 0
        return self.tokens_ST[slot, start:end].copy(), self.logprobs_ST[slot, start:end].copy()
