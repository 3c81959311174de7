"""One run of an agent loop over a session: recorded tokens first, then the engine's.

A loop always runs from its beginning. As long as the session has recorded tokens they are given
back to it, in order: those that the policy chose to ``generate``, the others are what ``observe``
put in before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from perdure.core.agent_api import Generated, ToolCall
from perdure.core.errors import ConfigError
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationChunk, GenerationRequest, RolloutEngine
from perdure.runtime.tool_calls import HistoryError, SessionCalls
from perdure.runtime.trajectory_builder import TrajectoryBuilder, final_reason
from perdure.tasks.tokenizer import Tokenizer, encode_known


@dataclass(slots=True)
class Watch:
    """What is known of a session in progress.

    Attributes:
        received: Told of new tokens, after each chunk.
    """

    started_s: float = 0.0
    last_token_s: float = 0.0
    tokens: int = 0
    doing: str = "generating"
    received: Callable[[int], None] = lambda _: None


class LiveSession:
    """What a loop sees of its session (``core.agent_api.AgentSession``).

    Args:
        builder: What the session has, and gets.
        engine: Where tokens come from.
        request: What is asked of it, without a prefix; the budget is the session's.
        tokenizer: Between text and tokens.
        calls: Makes the calls of tools.
        watch: Kept up to date.
    """

    def __init__(
        self,
        builder: TrajectoryBuilder,
        *,
        engine: RolloutEngine,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        calls: SessionCalls,
        watch: Watch,
    ) -> None:
        self._builder = builder
        self._engine = engine
        self._request = request
        self._tokenizer = tokenizer
        self._calls = calls
        self._watch = watch
        self._recorded = builder.response_ids()
        self._chosen = builder.chosen()
        self._at = 0

    @property
    def remaining_tokens(self) -> int:
        return self._request.sampling.max_new_tokens - self._at

    async def generate(self, until: Sequence[str] = ()) -> Generated:
        begin = self._at
        turn = _Turn(self._tokenizer, until, self._request.sampling.stop_token_ids)
        if not self._recall(turn):
            self._watch.doing = "generating"
            await self._decode(turn)
        return Generated(self._builder.response_ids()[begin : self._at], turn.reason)

    async def call(self, calls: Sequence[ToolCall]) -> list[str]:
        self._watch.doing = f"calling {', '.join(call.name for call in calls)}"
        return await self._calls.results(calls)

    def observe(self, parts: Sequence[str]) -> None:
        ids = [token for part in parts for token in encode_known(self._tokenizer, part)]
        if not ids:
            raise ConfigError(
                f"no token for anything in {''.join(parts)[:60]!r}",
                where="tokenizer of the task",
                rule="what tools say is put in as tokens",
                way_out="add the characters of <result> and of results to the task's alphabet",
            )
        ids = ids[: self.remaining_tokens]
        known = self._recorded[self._at : self._at + len(ids)]
        if list(known) != ids[: len(known)] or any(self._chosen[self._at :][: len(known)]):
            raise HistoryError("other tokens were put in before")
        self._builder.observed(ids[len(known) :], self._engine.version)
        self._at += len(ids)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _recall(self, turn: _Turn) -> bool:
        """Go through recorded tokens of the turn; whether it is over behind them."""
        while self._at < len(self._recorded) and self._chosen[self._at]:
            self._at += 1
            if turn.is_over(self._recorded[self._at - 1]):
                return True
        if self._at < len(self._recorded):
            raise HistoryError("the session has tokens that were put in where its loop generates")
        if not self.remaining_tokens:
            turn.reason = StopReason.LENGTH
        return not self.remaining_tokens

    async def _decode(self, turn: _Turn) -> None:
        sampling = self._request.sampling
        if turn.token_ids:
            stops = (*sampling.stop_token_ids, *turn.token_ids)
            sampling = replace(sampling, stop_token_ids=stops)
        prefix = self._builder.response_ids()
        request = replace(self._request, prefix_ids=prefix, sampling=sampling)
        stream = self._engine.generate(request)
        reason: StopReason | None = None
        try:
            async for chunk in stream:
                reason = chunk.stop_reason
                if self._take(chunk, turn):
                    return
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        turn.reason = final_reason(reason, self._builder.session)

    def _take(self, chunk: GenerationChunk, turn: _Turn) -> bool:
        """Add the tokens of a chunk up to the end of the turn; whether a text has ended it."""
        count, ended = turn.within(chunk.token_ids.tolist())
        if count < len(chunk.token_ids):
            chunk = replace(
                chunk, token_ids=chunk.token_ids[:count], logprobs=chunk.logprobs[:count]
            )
        self._builder.generated(chunk)
        self._at = self._builder.length
        self._watch.received(count)
        return ended


class _Turn:
    """Where a turn ends: behind a stop token, or behind one of the texts ``until``.

    Attributes:
        token_ids: Of texts that are one token: the engine itself can stop there.
        reason: Why the turn is over; None if with a text, and as long as it is not.
    """

    def __init__(self, tokenizer: Tokenizer, until: Sequence[str], stops: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._until = tuple(until)
        self._stops = stops
        self._keep = max(map(len, until), default=0)
        self._tail = ""
        tokens = [encode_known(tokenizer, text) for text in until]
        self.token_ids = tuple([ids[0] for ids in tokens if len(ids) == 1])
        self.reason: StopReason | None = None

    def is_over(self, token: int) -> bool:
        """Whether this token, the next one of the turn, is its last."""
        if token in self._stops:
            self.reason = StopReason.STOP
            return True
        return bool(self._until) and self._ends_with(token)

    def within(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """How many of these tokens belong to the turn, and whether a text ends it with them."""
        if self._until:
            for count, token in enumerate(token_ids, 1):
                if self._ends_with(token):
                    return count, True
        return len(token_ids), False

    def _ends_with(self, token: int) -> bool:
        self._tail = (self._tail + self._tokenizer.decode([token]))[-self._keep :]
        return self._tail.endswith(self._until)
