"""The ``local`` runtime: one machine, a pool of engines and a learner of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from perdure.core.events import EventSink
from perdure.core.ids import PolicyVersion, UpdateId
from perdure.core.rollout_api import SamplingParams
from perdure.core.trajectories import RewardedGroup, Trajectory
from perdure.experience import OpenGroup
from perdure.learner.api import Example, Learner, LocalUpdateResult
from perdure.publish import Publication
from perdure.rollout import EnginePool
from perdure.rollout.members import MemberReport
from perdure.runtime.answers import one_error
from perdure.runtime.api import RolloutLoad, RunningSession
from perdure.runtime.dispatcher import Dispatcher
from perdure.runtime.fleet import EngineFleet
from perdure.runtime.guest import GuestEngine
from perdure.tasks.api import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What generates.

    Attributes:
        pool: The engines.
        publication: Brings weights to them; closed with the runtime's engines.
        dispatcher: Runs groups in the background, on the pool.
        fleet: The engines that are not in this process; None: all are.
        guest: The engine on the learner's devices; None: there is none beside those of the pool.
    """

    pool: EnginePool
    publication: Publication
    dispatcher: Dispatcher
    fleet: EngineFleet | None = None
    guest: GuestEngine | None = None


class LocalRuntime:
    """A pool of engines and a learner on one machine.

    Args:
        rollout: The engines, and what is about them.
        learner: Trains the policy.
        learner_thread: Where the learner works, so that sessions go on meanwhile; None: in the
            event loop's thread, which then stands still.
    """

    def __init__(
        self,
        rollout: RolloutParts,
        *,
        learner: Learner,
        learner_thread: Executor | None,
        events: EventSink,
    ) -> None:
        self._pool = rollout.pool
        self._publication = rollout.publication
        self._dispatcher = rollout.dispatcher
        self._sessions = rollout.dispatcher.sessions
        self._fleet = rollout.fleet
        self._guest = rollout.guest
        self._learner = learner
        self._learner_thread = learner_thread
        self._events = events
        self._asleep = False
        # While engines are lost there is less room, or none; they come back at any time.
        rollout.pool.on_admitted = rollout.dispatcher.notify

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        with one_error():
            try:
                if self._fleet is None:
                    yield
                else:
                    async with self._fleet.running():
                        yield
            finally:
                await self._publication.close()

    async def run_groups(self, groups: Sequence[OpenGroup]) -> None:
        with one_error():
            await self._sessions.run_groups(groups)

    @asynccontextmanager
    async def background_rollout(self) -> AsyncGenerator[None]:
        with one_error():
            async with self._dispatcher.running():
                yield

    def groups_submitted(self) -> None:
        self._dispatcher.notify()

    async def wait_for_settled(self, *, beyond: int, timeout_s: float) -> int:
        return await self._dispatcher.wait_for_settled(beyond=beyond, timeout_s=timeout_s)

    @property
    def generated_tokens(self) -> int:
        return self._sessions.generated_tokens

    def running_sessions(self) -> list[RunningSession]:
        return self._sessions.running()

    def engines(self) -> tuple[MemberReport, ...]:
        return self._pool.describe()

    def rollout_load(self) -> RolloutLoad:
        slots = self._pool.capabilities.slots
        extra = 0 if self._guest is None else self._guest.slots
        return RolloutLoad(
            settled=self._dispatcher.settled,
            queued=max(self._dispatcher.running_sessions - slots, 0),
            scaling=(slots + extra) / slots if slots else 1.0,
        )

    async def lend_learner(self) -> bool:
        if self._guest is None or not await self._guest.join():
            return False
        self._dispatcher.notify()
        return True

    async def reclaim_learner(self) -> None:
        if self._guest is not None:
            await self._guest.leave()

    async def interrupt_rollout(self) -> None:
        await self._pool.interrupt()

    async def answer(
        self, prompts: Sequence[Prompt], *, sampling: SamplingParams
    ) -> list[Trajectory]:
        return await self._sessions.answer(prompts, sampling=sampling)

    async def sleep_rollout(self) -> None:
        if not self._asleep:
            await self._pool.sleep()
            self._asleep = True

    async def wake_rollout(self) -> None:
        if self._asleep:
            await self._pool.wake()
            self._asleep = False

    async def publish(self, version: PolicyVersion, *, announce: Callable[[], None]) -> str:
        if self._fleet is not None:
            await self._fleet.ready()
        digest = self._learner.policy_digest()
        weights = self._learner.policy_weights()
        done = await self._publication.publish(
            version,
            weights=weights,
            digest=digest,
            announce=announce,
            nobody_comes=self._nobody_comes,
        )
        for engine, reason in done.missing.items():
            self._events("engine_quarantined", {"engine": engine, "reason": reason})
        await self._pool.resume()
        return digest

    async def supervised_step(self, step: int, examples: Sequence[Example]) -> dict[str, float]:
        return await self._on_learner(lambda: self._learner.supervised_step(step, examples))

    async def begin_training(self) -> None:
        await self._on_learner(self._learner.begin_training)

    async def local_update(
        self,
        update: UpdateId,
        groups: Sequence[RewardedGroup],
        *,
        version: PolicyVersion | None,
    ) -> LocalUpdateResult:
        return await self._on_learner(
            lambda: self._learner.local_update(update, groups, version=version)
        )

    async def state_digest(self) -> str:
        return self._learner.state_digest()

    async def policy_digest(self) -> str:
        return self._learner.policy_digest()

    async def reference_digest(self) -> str:
        return self._learner.reference_digest()

    @property
    def optimizer_step(self) -> int:
        return self._learner.optimizer_step

    async def _nobody_comes(self) -> None:
        if self._fleet is not None:
            await self._fleet.nobody_comes()

    async def _on_learner(self, work: Callable[[], T]) -> T:
        if self._learner_thread is None:
            result = work()
            await asyncio.sleep(0)
            return result
        return await asyncio.get_running_loop().run_in_executor(self._learner_thread, work)
