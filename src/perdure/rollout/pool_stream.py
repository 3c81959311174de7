"""One request of a pool, from engine to engine, until it is over.

An attempt that an engine does not finish is sent again as prompt + prefix: token t is drawn with
draw t of the request's own stream, so the rest is what the engine would have generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from perdure.core.errors import EngineLostError
from perdure.core.ids import PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationChunk, GenerationRequest
from perdure.rollout.balancer import Placement
from perdure.rollout.members import Member, MemberState
from perdure.rollout.requests import prefix_end


class StreamHost(Protocol):
    """What a stream asks of its pool."""

    @property
    def version(self) -> PolicyVersion: ...

    async def enter(self, stream: PoolStream) -> Member | None:
        """Wait for an engine and take a place there; None: the stream was aborted meanwhile."""
        ...

    def leave(self, stream: PoolStream) -> None:
        """Give the place back, if it still has one."""
        ...

    def heard(self, member: Member, tokens: int) -> None:
        """The engine has given so many tokens."""
        ...

    def lose(self, member: Member, error: EngineLostError) -> None:
        """The engine is gone."""
        ...

    def continued(self, stream: PoolStream, *, setback: bool) -> None:
        """The attempt ended before the request did. Raises ``EngineLostError``: once too often."""
        ...


class PoolStream:
    """State of a live request. One consumer iterates :meth:`chunks`.

    Attributes:
        request: What an engine is, or was last, asked: the caller's, with the tokens that it had.
        member: Where it is served; kept after ``placement`` is gone, until the attempt has ended.
        placement: Its place at that engine; None at the door, and after an interruption.
        aborted: Whether the caller has ended it.
        setbacks: Attempts that ended in an engine's death, or without a token for no known reason.
        last_loss: Why the last engine was lost.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._tokens = list(request.prefix_ids)
        self.member: Member | None = None
        self.placement: Placement | None = None
        self.aborted = False
        self.setbacks = 0
        self.last_loss: EngineLostError | None = None
        self._scope: asyncio.Timeout | None = None

    def recall(self) -> None:
        """Have it wait no longer for an engine that is lost."""
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def chunks(self, host: StreamHost) -> AsyncGenerator[GenerationChunk]:
        """Stream the answer across attempts.

        Waits at the door and for engines, each with the pool's deadlines; cancellation leaves
        neither a place nor an attempt behind.
        """
        while True:
            self.request = replace(self.request, prefix_ids=tuple(self._tokens))
            reason = prefix_end(self.request)
            member = None
            if reason is None:
                member = await host.enter(self)
                reason = StopReason.ABORTED
            if member is None:
                yield _last_chunk(host.version, reason)
                return
            attempt = self._attempt(host, member)
            try:
                async for chunk in attempt:
                    yield chunk
                    if chunk.stop_reason is not None:
                        return
            finally:
                await attempt.aclose()

    async def _attempt(self, host: StreamHost, member: Member) -> AsyncGenerator[GenerationChunk]:
        """Chunks of one engine; ends without a stop reason if the request is to go on elsewhere."""
        spent = len(self._tokens)
        recalled = False
        stream = member.engine.generate(self.request)
        try:
            while (chunk := await self._next(stream, member)) is not None:
                host.heard(member, len(chunk.token_ids))
                over = chunk.stop_reason is StopReason.ABORTED
                recalled = self.placement is None
                if chunk.stop_reason is not None:
                    host.leave(self)
                self._tokens += chunk.token_ids.tolist()
                if not over or self.aborted:
                    yield chunk
                elif len(chunk.token_ids):
                    yield replace(chunk, stop_reason=None)
                if over:
                    break
        except EngineLostError as error:
            self.last_loss = error
            host.lose(member, error)
        finally:
            host.leave(self)
            await _close(stream)
        lost = member.state is MemberState.LOST
        fruitless = len(self._tokens) == spent and not recalled
        host.continued(self, setback=lost or fruitless)

    async def _next(
        self, stream: AsyncIterator[GenerationChunk], member: Member
    ) -> GenerationChunk | None:
        """The engine's next chunk; None: the engine was lost while it was waited for."""
        lost = member.state is MemberState.LOST
        member.begin_waiting()
        try:
            # What a lost engine has sent before is there at once; nothing else is waited for.
            async with asyncio.timeout(0 if lost else None) as self._scope:
                return await anext(stream)
        except (TimeoutError, RuntimeError):
            if member.state is MemberState.LOST:
                return None
            raise
        finally:
            member.waiting -= 1
            self._scope = None


async def _close(stream: AsyncIterator[GenerationChunk]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


def _last_chunk(version: PolicyVersion, reason: StopReason | None) -> GenerationChunk:
    return GenerationChunk(np.zeros(0, np.int32), np.zeros(0, np.float32), version, reason)
