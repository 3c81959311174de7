"""Several engines as one: requests go to whoever has least to do, and survive whoever dies.

The pool is itself a ``core.rollout_api.RolloutEngine``. Its streams go on over interruptions,
publications and the death of engines; every wait has a deadline that names who was waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from perdure.core.errors import EngineLostError, TrainingError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import (
    NO_INCARNATION,
    EngineCapabilities,
    GenerationChunk,
    GenerationRequest,
    LossListener,
    RolloutEngine,
    Weights,
)
from perdure.rollout.embedded import NO_VERSION
from perdure.rollout.members import Member, MemberEvent, MemberReport, MemberState
from perdure.rollout.options import PoolOptions
from perdure.rollout.pool_stream import PoolStream
from perdure.rollout.requests import check_request
from perdure.rollout.roster import PoolCounts, Roster


class EnginePool:
    """Named engines behind one door.

    An engine that is added serves after it has weights: :meth:`load_weights` gives them to all,
    a publication to each (:meth:`hold`, load, :meth:`admit`).

    Two verbs end what engines are doing. :meth:`interrupt` is the owner's: streams wait and go on
    after :meth:`resume`. :meth:`abort` is the caller's: its streams end with ``ABORTED``.

    Args:
        engines: Members by name, without weights; the pool closes them.
        options: Deadlines.
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine] | None = None,
        *,
        options: PoolOptions | None = None,
    ) -> None:
        self._options = options or PoolOptions()
        self._roster = Roster(self._options, on_loss=self._bring_back, recall=self._recall)
        self._streams: dict[str, PoolStream] = {}
        self._version = NO_VERSION
        self._lacks = "has no weights"
        self._closed = False
        self.on_admitted: Callable[[], None] | None = None
        """Told that an engine has traffic, which it may not have had before."""
        for name, engine in (engines or {}).items():
            self.add(name, engine)

    @property
    def counts(self) -> PoolCounts:
        """What the pool has seen so far; the object is kept up to date."""
        return self._roster.counts

    # --- the engine protocol

    @property
    def capabilities(self) -> EngineCapabilities:
        """Of the engines that are not lost, together."""
        each = [member.engine.capabilities for member in self._roster.live()]
        return EngineCapabilities(
            sleep_frees_memory=all(one.sleep_frees_memory for one in each),
            slots=sum(one.slots for one in each),
            max_tokens=min((one.max_tokens for one in each), default=0),
        )

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights last admitted; -1 before the first."""
        return self._version

    @property
    def undelivered_tokens(self) -> int:
        return sum(member.engine.undelivered_tokens for member in self._roster.live())

    def on_loss(self, tell: LossListener) -> None:
        """A pool outlives its engines: there is never anything to tell."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        """Stream the answer, whatever becomes of the engines.

        Raises:
            ValueError: The request does not fit.
            RuntimeError: The pool is closed, asleep or has no weights (and is not paused).
            TrainingError: Decoding failed.
            EngineLostError: No engine served it in time, or it lost every engine it was sent to.
        """
        self._check_open()
        check_request(request)
        if request.request_id in self._streams:
            raise ValueError(
                f"request {request.request_id!r} is live already; ids are unique among live ones"
            )
        stream = PoolStream(request)
        self._streams[request.request_id] = stream
        try:
            async with aclosing(stream.chunks(self)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            del self._streams[request.request_id]

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (all when None), wherever they are; unknown ids are ignored."""
        ids = list(self._streams) if request_ids is None else list(dict.fromkeys(request_ids))
        ended = 0
        with_engines: dict[Member, list[str]] = {}
        for key in ids:
            stream = self._streams.get(key)
            if stream is None:
                continue
            if stream.placement is not None and stream.member is not None:
                with_engines.setdefault(stream.member, []).append(key)
            else:
                ended += not stream.aborted
            stream.aborted = True
        self._roster.notify()
        counts = await self._roster.ask(
            with_engines, "abort", lambda member: member.engine.abort(with_engines[member])
        )
        return ended + sum(counts.values())

    async def pause(self) -> None:
        """Let no new request in (they wait); running ones go on."""
        self._roster.paused = True
        await self._roster.ask(self._roster.live(), "pause", lambda m: m.engine.pause())

    async def resume(self) -> None:
        """Let requests in again; those that waited fail if the pool has no weights for them."""
        asked: set[Member] = set()
        # One that is admitted meanwhile is behind a shut door and was not asked.
        while fresh := self._serving() - asked:
            asked |= fresh
            await self._roster.ask(fresh, "resume", lambda m: m.engine.resume())
        self._roster.paused = False
        self._roster.notify()

    async def sleep(self) -> None:
        """Free weights and KV memory of every engine.

        Raises:
            RuntimeError: Requests are with engines; :meth:`interrupt` brings them to the door.
        """
        self._check_idle("sleep", "live")
        self._lacks = "is asleep and has no weights"
        for member in self._roster.live():
            if member.takes_weights:
                self._roster.apply(member, MemberEvent.QUARANTINE, "asleep")
        await self._roster.ask(self._roster.live(), "sleep", lambda m: m.engine.sleep())

    async def wake(self) -> None:
        """Restore memory; weights are absent until they are loaded."""
        self._check_open()
        await self._roster.ask(self._roster.live(), "wake", lambda m: m.engine.wake())
        if self._lacks:
            self._lacks = "has no weights"

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Weights,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        """Load them into every engine; engines serve after it.

        Raises:
            RuntimeError, ValueError, FencedError: As an engine's.
            EngineLostError: There is no engine.
            TrainingError: Engines hold different bytes now; all are quarantined.
        """
        self._check_open()
        self._check_idle("load weights", "decoding")
        digests = await self._roster.ask(
            [member for member in self._roster.live() if member.takes_weights],
            "load_weights",
            lambda m: m.engine.load_weights(version, weights, incarnation=incarnation),
        )
        if not digests:
            raise EngineLostError(
                "no engine is there to load weights",
                where="engine pool",
                rule="weights are held by one engine at least",
                way_out="see why the engines were lost, then resume the run",
            )
        if len(set(digests.values())) > 1:
            for name in digests:
                self.quarantine(name, "the engines hold different weights")
            raise TrainingError(
                f"engines hold different weights of version {version}: {digests}",
                where="engine pool",
                rule="a version is the same bytes everywhere",
                way_out="check the memory of the machine that differs, then resume the run",
            )
        for name in digests:
            await self.admit(name)
        return next(iter(digests.values()))

    async def close(self) -> None:
        """End every stream with ``RuntimeError`` and close every engine. Idempotent."""
        self._closed = True
        await self._roster.close()

    # --- what the owner of the engines does

    async def interrupt(self) -> None:
        """Shut the door and bring every request back to it; streams go on after :meth:`resume`.

        What engines had for a stream is streamed. Nothing is decoded when this returns.
        """
        await self.pause()
        members = self._roster.live()
        await self._roster.ask(members, "abort", lambda m: m.engine.abort())
        for member in members:
            self._bring_back(member)

    def add(self, name: str, engine: RolloutEngine) -> None:
        """A new engine; it serves when it was given weights and is admitted.

        Raises:
            ValueError: An engine of that name is not lost.
        """
        self._check_open()
        self._roster.add(name, engine)

    async def hold(self, name: str) -> None:
        """No traffic for this engine; what it has goes on elsewhere, from its prefix.

        Raises:
            EngineLostError: It is lost, or does not answer.
        """
        member = self._roster.find(name)
        self._roster.apply(member, MemberEvent.HOLD, member.reason or "held")
        await self._roster.ask([member], "pause", lambda m: m.engine.pause())
        await self._roster.ask([member], "abort", lambda m: m.engine.abort())
        self._bring_back(member)
        self._roster.find(name)

    async def admit(self, name: str) -> None:
        """Traffic for this engine: it has acknowledged its weights.

        Raises:
            EngineLostError: It is lost, or does not answer.
        """
        member = self._roster.find(name)
        if not self._roster.paused:
            await self._roster.ask([member], "resume", lambda m: m.engine.resume())
        self._roster.apply(self._roster.find(name), MemberEvent.ADMIT)
        self._version = member.engine.version
        self._lacks = ""
        if self.on_admitted is not None:
            self.on_admitted()

    def quarantine(self, name: str, reason: str) -> None:
        """No traffic for this engine before it is admitted again. One that is gone has none."""
        member = {m.name: m for m in self._roster.live()}.get(name)
        if member is not None and member.takes_weights:
            self._roster.apply(member, MemberEvent.QUARANTINE, reason)

    async def drain(self, name: str, *, timeout_s: float) -> None:
        """Let this engine finish what it has, then close and forget it.

        What is not finished within ``timeout_s`` goes on elsewhere, from its prefix.
        """
        member = self._roster.find(name)
        self._roster.apply(member, MemberEvent.DRAIN, "leaves")
        try:
            async with asyncio.timeout(timeout_s):
                while member.state is MemberState.DRAINING and self._roster.in_flight(name):
                    await self._roster.change()
        except TimeoutError:
            await self._roster.ask([member], "abort", lambda m: m.engine.abort())
            self._bring_back(member)
        if member.state is MemberState.DRAINING:
            self._roster.forget(member)

    async def next_loss(self) -> str:
        """Wait for the loss of an engine and return its name; each loss is told once."""
        return await self._roster.next_loss()

    @property
    def takers(self) -> Mapping[str, RolloutEngine]:
        """The engines that weights are published to."""
        return self._roster.takers

    def describe(self) -> tuple[MemberReport, ...]:
        """Every engine, lost ones included until they are replaced."""
        return self._roster.describe()

    # --- what streams ask (pool_stream.StreamHost)

    async def enter(self, stream: PoolStream) -> Member | None:
        """Wait for the door and for an engine; None: the stream was aborted meanwhile."""
        began_s = _now()
        shut = self._roster.paused
        while not stream.aborted:
            self._check_open()
            if shut is not self._roster.paused:
                shut, began_s = self._roster.paused, _now()
            if not shut:
                if self._lacks:
                    raise RuntimeError(f"the engine pool {self._lacks}; load weights first")
                place = self._roster.place(stream.request.request_id)
                if place is not None:
                    stream.member, stream.placement = place
                    return stream.member
            await self._wait_at_door(stream, began_s, shut=shut)
        return None

    async def _wait_at_door(self, stream: PoolStream, began_s: float, *, shut: bool) -> None:
        options = self._options
        limit_s = options.door_timeout_s if shut else options.no_engine_timeout_s
        try:
            async with asyncio.timeout_at(began_s + limit_s):
                await self._roster.change()
        except TimeoutError:
            engines = "; ".join(map(str, self.describe())) or "none"
            rule = f"{'door' if shut else 'no_engine'}_timeout_s = {limit_s:g}"
            raise EngineLostError(
                f"request {stream.request.request_id!r} has waited {limit_s:g} s "
                f"{'at the paused door' if shut else 'for an engine'}; engines: {engines}",
                where="engine pool",
                rule=rule,
                way_out="see why the engines do not serve, then try again",
            ) from stream.last_loss

    def leave(self, stream: PoolStream) -> None:
        if stream.placement is not None:
            self._roster.release(stream.placement)
            stream.placement = None

    def heard(self, member: Member, tokens: int) -> None:
        self._roster.heard(member, tokens)

    def lose(self, member: Member, error: EngineLostError) -> None:
        self._roster.lose(member, error)

    def continued(self, stream: PoolStream, *, setback: bool) -> None:
        """Count it. Raises ``EngineLostError`` if this request is unlucky too often."""
        self._roster.counts.continuations += 1
        stream.setbacks += setback
        if stream.setbacks > self._options.max_setbacks:
            name = "" if stream.member is None else stream.member.name
            raise EngineLostError(
                f"request {stream.request.request_id!r} got nowhere {stream.setbacks} times, "
                f"last with engine {name!r}",
                where="engine pool",
                rule=f"max_setbacks = {self._options.max_setbacks}",
                way_out="see why engines die with this request; raise it if they die for others",
            ) from stream.last_loss

    def _bring_back(self, member: Member) -> None:
        """Its requests are no longer there; their streams notice when they read on."""
        for stream in self._streams.values():
            if stream.member is member:
                self.leave(stream)

    def _recall(self, member: Member) -> None:
        for stream in self._streams.values():
            if stream.member is member:
                stream.recall()

    def _serving(self) -> set[Member]:
        return {m for m in self._roster.live() if m.state is MemberState.SERVING}

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine pool is closed")

    def _check_idle(self, verb: str, state: str) -> None:
        placed = sum(stream.placement is not None for stream in self._streams.values())
        if placed:
            raise RuntimeError(
                f"cannot {verb} while {placed} requests are {state}; interrupt or abort them first"
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
