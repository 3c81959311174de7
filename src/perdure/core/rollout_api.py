"""The rollout contract: requests in, streams of chunks out. Five verbs that are never mixed up.

``abort`` ends requests and returns what they have; ``pause``/``resume`` shut and open the door for
new requests; ``sleep``/``wake`` free and restore memory; ``load_weights`` publishes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.core.errors import EngineLostError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.trajectories import Array

MIN_TEMPERATURE = 1e-4
"""Colder than this, logits divided by it could overflow; greedy is temperature 0."""

NO_INCARNATION = IncarnationNumber(0)
"""Below every incarnation of a run: of weights that belong to none."""

LossListener = Callable[[EngineLostError], None]
"""Told once, when an engine is lost, and why."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Weights laid out in a file that an engine on this machine (or mount) can read.

    Attributes:
        path: Absolute.
        checksum: xxh3-128 hex of the whole file; a reader refuses any other bytes.
    """

    path: str
    checksum: str


Weights = Mapping[str, Any] | WeightFile
"""By name, tensors or numpy arrays; or where they lie."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        temperature: 0 means greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches p; 1 keeps all.
        max_new_tokens: Budget of the whole session, prefix included.
        stop_token_ids: Generation ends after one of these (it is part of the output).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request.

    Attributes:
        request_id: Unique among live requests.
        prompt_ids: Token ids of the prompt.
        prefix_ids: Tokens already generated in an earlier attempt; they count against the budget,
            and generation goes on behind them.
        random_key: Numbers that name this request's random stream, e.g. ``(seed, group, session)``.
            Token t (prefix counted) uses draw t of the stream, whatever else is in the batch.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    random_key: tuple[int, ...]
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of the answer, in order.

    Attributes:
        token_ids: int32 (n,), new tokens of this chunk; may be empty in the last chunk.
        logprobs: float32 (n,), of the distribution sampled from (after temperature and truncation);
            greedy: of the temperature-1 distribution.
        version: Policy version that generated every token of this chunk.
        stop_reason: Set in the last chunk only.
    """

    token_ids: Array
    logprobs: Array
    version: PolicyVersion
    stop_reason: StopReason | None = None


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What this engine can really do."""

    sleep_frees_memory: bool
    slots: int
    max_tokens: int
    """Longest prompt + response of one request."""


class RolloutEngine(Protocol):
    """A source of tokens. All methods are called from one event loop."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights held."""
        ...

    @property
    def undelivered_tokens(self) -> int:
        """Tokens decoded for live requests that no stream was given so far.

        Of a lost engine: those that went with it.
        """
        ...

    def on_loss(self, tell: LossListener) -> None:
        """Have ``tell`` called when the engine is lost; from then on it serves nobody."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Stream the answer; the last chunk carries the stop reason.

        Closing the iterator early aborts the request.

        Raises:
            ValueError: The request does not fit (too long, duplicate id, empty prompt).
            RuntimeError: The engine is asleep or has no weights (behind a paused door requests wait
                instead).
            TrainingError: Decoding failed.
            EngineLostError: The engine is gone; all that it had sent was streamed before.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (all when None): each stream gets what it has, then ``ABORTED``.

        Returns the number of requests ended.
        """
        ...

    async def pause(self) -> None:
        """Let no new request in (they wait); running ones go on."""
        ...

    async def resume(self) -> None:
        """Let requests in again."""
        ...

    async def sleep(self) -> None:
        """Free weights and KV memory. Raises ``RuntimeError`` while requests are live.

        Those that wait behind a paused door hold no memory and do not count.
        """
        ...

    async def wake(self) -> None:
        """Restore memory; weights are absent until :meth:`load_weights`."""
        ...

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Weights,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        """Copy the weights in and return the digest of what is now held.

        Raises:
            RuntimeError: Requests are decoding.
            ValueError: Names, shapes or types differ; the engine keeps its old weights.
            DamagedError: The file holds other bytes than it should; likewise.
            FencedError: A higher incarnation has published to this engine.
        """
        ...

    async def close(self) -> None: ...


class PublicationTarget(Protocol):
    """Named engines whose weights and traffic a publication governs."""

    @property
    def takers(self) -> Mapping[str, RolloutEngine]:
        """Those that take weights; none that is lost or leaving."""
        ...

    async def hold(self, name: str) -> None:
        """No traffic for this engine, and nothing running. ``EngineLostError``: it is gone."""
        ...

    async def admit(self, name: str) -> None:
        """Traffic for it: it has acknowledged. ``EngineLostError``: it is gone."""
        ...

    def quarantine(self, name: str, reason: str) -> None:
        """No traffic for it before it is admitted again. One that is gone has none anyway."""
        ...
