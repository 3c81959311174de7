"""The engines of a pool: asked together, watched, placed by the balancer, lost and replaced.

Whoever does not answer in time is lost: its name gets no traffic until another engine takes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.core.errors import EngineLostError
from perdure.core.rollout_api import RolloutEngine
from perdure.rollout.balancer import Balancer, Placement
from perdure.rollout.members import Member, MemberEvent, MemberReport, MemberState
from perdure.rollout.options import PoolOptions
from perdure.rollout.silence import SilenceWatch


@dataclass(slots=True)
class PoolCounts:
    """What a pool has seen so far.

    Attributes:
        tokens_received: From engines, each once.
        tokens_lost: Decoded by engines that died, and never sent; they are generated again.
        continuations: Attempts that ended before their request did.
        engines_lost: Deaths and silences.
    """

    tokens_received: int = 0
    tokens_lost: int = 0
    continuations: int = 0
    engines_lost: int = 0


class Roster:
    """Members by name.

    Args:
        options: Deadlines.
        on_loss: Told of a lost member at once: it has no requests any more.
        recall: Told of it in a later turn of the event loop: what it had sent has been taken, and
            nobody is to wait for more.

    Attributes:
        paused: The pool's door is shut: silence of engines means nothing.
    """

    def __init__(
        self,
        options: PoolOptions,
        *,
        on_loss: Callable[[Member], None],
        recall: Callable[[Member], None],
    ) -> None:
        self._options = options
        self._on_loss = on_loss
        self._recall = recall
        self._balancer = Balancer(sticky_requests=options.sticky_requests)
        self._members: dict[str, Member] = {}
        self._losses: deque[str] = deque()
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.paused = False
        self.counts = PoolCounts()

    def add(self, name: str, engine: RolloutEngine) -> None:
        """A new engine in quarantine; it may take the name of a lost one. Else ``ValueError``."""
        old = self._members.get(name)
        if old is not None and old.state is not MemberState.LOST:
            raise ValueError(f"there is an engine {name!r} already; names are unique")
        self._balancer.add(name)
        watch = SilenceWatch(
            self._options.silence_timeout_s,
            expected=lambda: self._owes_tokens(member),
            on_silence=lambda silent_s: self.lose(member, self._silent(member, silent_s)),
        )
        member = Member(name, engine, watch)
        self._members[name] = member
        engine.on_loss(lambda error: self.lose(member, error))

    def live(self) -> list[Member]:
        """All that are not lost."""
        return [m for m in self._members.values() if m.state is not MemberState.LOST]

    def find(self, name: str) -> Member:
        """Raises ``EngineLostError`` if it is lost or gone."""
        member = self._members.get(name)
        if member is None or member.state is MemberState.LOST:
            reason = "is not in the pool" if member is None else f"is lost: {member.reason}"
            raise EngineLostError(
                f"engine {name!r} {reason}",
                where="engine pool",
                rule="a lost engine's requests go on elsewhere",
                way_out="add another engine under its name",
            )
        return member

    def apply(self, member: Member, event: MemberEvent, reason: str = "") -> None:
        """Change a member's state, and whether it gets traffic. ``ValueError``: not possible."""
        member.apply(event, reason)
        if member.state is MemberState.SERVING:
            self._balancer.admit(member.name)
        else:
            self._balancer.drain(member.name)
        self.notify()

    async def change(self) -> None:
        """Wait until something is different: a state, the door, what somebody was told."""
        await self._changed.wait()

    def notify(self) -> None:
        """Let everybody who waits look again."""
        self._changed.set()
        self._changed.clear()

    # --- traffic

    def place(self, request_id: str) -> tuple[Member, Placement] | None:
        """A place at an engine; None: none serves."""
        placement = self._balancer.place(request_id)
        if placement is None:
            return None
        member = self._members[placement.engine]
        member.watch.start()
        return member, placement

    def release(self, placement: Placement) -> None:
        self._balancer.release(placement)
        self.notify()

    def in_flight(self, name: str) -> int:
        """Requests with this engine."""
        return self._balancer.in_flight.get(name, 0)

    def heard(self, member: Member, tokens: int) -> None:
        """It has given tokens."""
        member.watch.heard()
        self.counts.tokens_received += tokens

    def _owes_tokens(self, member: Member) -> bool:
        held = self.paused or member.state is MemberState.PAUSED
        return bool(member.waiting and not held)

    def _silent(self, member: Member, silent_s: float) -> EngineLostError:
        return EngineLostError(
            f"engine {member.name!r} has given no token for {silent_s:.1f} s, "
            f"with {self.in_flight(member.name)} requests in flight",
            where="engine pool",
            rule=f"silence_timeout_s = {self._options.silence_timeout_s:g}",
            way_out="its requests go on elsewhere; see its output, or raise the limit",
        )

    # --- asking and losing

    async def ask(
        self, members: Iterable[Member], verb: str, call: Callable[[Member], Awaitable[Any]]
    ) -> dict[str, Any]:
        """The answers of those that gave one in time, by name; the others are lost.

        Any other exception of an engine is raised, after all have answered.
        """
        asked = list(members)
        calls = [self._answer(member, verb, call) for member in asked]
        # A single one is asked in this very turn of the event loop.
        answers = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        found: dict[str, Any] = {}
        refusal: Exception | None = None
        for member, answer in zip(asked, answers, strict=True):
            if isinstance(answer, EngineLostError):
                self.lose(member, answer)
            elif isinstance(answer, Exception):
                refusal = refusal or answer
            else:
                found[member.name] = answer
        if refusal is not None:
            raise refusal
        return found

    async def _answer(
        self, member: Member, verb: str, call: Callable[[Member], Awaitable[Any]]
    ) -> Any:
        """What the engine answers, or the exception that it raises."""
        limit_s = self._options.verb_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await call(member)
        except TimeoutError:
            return EngineLostError(
                f"engine {member.name!r} has not answered {verb} for {limit_s:g} s",
                where="engine pool",
                rule=f"verb_timeout_s = {limit_s:g}",
                way_out="its requests go on elsewhere; see its output, or raise the limit",
            )
        except Exception as error:  # noqa: BLE001 - raised when all have answered
            return error

    def lose(self, member: Member, error: EngineLostError) -> None:
        """No traffic for it any more; its requests go elsewhere. The second time is nothing."""
        if member.state is MemberState.LOST or self._members.get(member.name) is not member:
            return
        self.counts.engines_lost += 1
        self.counts.tokens_lost += member.engine.undelivered_tokens
        member.apply(MemberEvent.LOSE, str(error))
        member.watch.stop()
        self._balancer.remove(member.name)
        self._losses.append(member.name)
        self._on_loss(member)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._recall, member)
        self.close_engine(member)
        self.notify()

    def forget(self, member: Member) -> None:
        """It has left in an orderly way."""
        member.watch.stop()
        if self._members.get(member.name) is member:
            self._balancer.remove(member.name)
            del self._members[member.name]
        self.close_engine(member)
        self.notify()

    async def next_loss(self) -> str:
        """Wait for the loss of an engine and return its name; each loss is told once."""
        while not self._losses:
            await self.change()
        return self._losses.popleft()

    def close_engine(self, member: Member) -> None:
        """Close an engine in the background; :meth:`close` waits for it."""
        task = asyncio.get_running_loop().create_task(self._close_engine(member))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_engine(self, member: Member) -> None:
        await self.ask([member], "close", lambda m: m.engine.close())

    async def close(self) -> None:
        """Close every engine; no wait is longer than that for a verb."""
        for member in self.live():
            member.watch.stop()
            self.close_engine(member)
        self.notify()
        if self._closing:
            await asyncio.gather(*self._closing)

    # --- telling

    @property
    def takers(self) -> Mapping[str, RolloutEngine]:
        """The engines that weights are published to."""
        return {name: m.engine for name, m in self._members.items() if m.takes_weights}

    def describe(self) -> tuple[MemberReport, ...]:
        """Every engine, lost ones included until they are replaced."""
        return tuple(
            MemberReport(
                name=name,
                state=member.state,
                reason=member.reason,
                version=member.engine.version,
                in_flight=self.in_flight(name),
                silent_s=member.watch.silent_s if member.waiting else 0.0,
            )
            for name, member in self._members.items()
        )
