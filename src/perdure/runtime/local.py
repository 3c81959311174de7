"""The ``local`` runtime: one process, the embedded engine and a learner of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from perdure.core.ids import PolicyVersion, UpdateId
from perdure.core.rollout_api import RolloutEngine, SamplingParams
from perdure.core.trajectories import RewardedGroup, Trajectory
from perdure.experience import OpenGroup
from perdure.learner.api import Learner, LocalUpdateResult
from perdure.publish import InProcessTransport, Publication
from perdure.rollout import EnginePool
from perdure.runtime.answers import answer, one_error
from perdure.runtime.sessions import SessionRunner
from perdure.tasks.api import Prompt


class LocalRuntime:
    """Rollout engine and learner share this process and its devices."""

    def __init__(
        self, *, engine: RolloutEngine, learner: Learner, sessions: SessionRunner, seed: int
    ) -> None:
        self._engine = engine
        self._learner = learner
        self._sessions = sessions
        self._publication = Publication(EnginePool({"engine": engine}), InProcessTransport())
        self._seed = seed
        self._asleep = False

    async def run_groups(self, groups: Sequence[OpenGroup]) -> None:
        with one_error():
            await self._sessions.run_groups(groups)

    async def answer(
        self, prompts: Sequence[Prompt], *, sampling: SamplingParams
    ) -> list[Trajectory]:
        return await answer(self._engine, prompts, sampling=sampling, seed=self._seed)

    async def sleep_rollout(self) -> None:
        if not self._asleep:
            await self._engine.sleep()
            self._asleep = True

    async def wake_rollout(self) -> None:
        if self._asleep:
            await self._engine.wake()
            self._asleep = False

    async def publish(self, version: PolicyVersion) -> str:
        digest = self._learner.policy_digest()
        weights = self._learner.policy_weights()
        await self._publication.publish(version, weights=weights, digest=digest)
        return digest

    async def supervised_step(
        self, step: int, examples: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> dict[str, float]:
        metrics = self._learner.supervised_step(step, examples)
        await asyncio.sleep(0)
        return metrics

    async def begin_training(self) -> None:
        self._learner.begin_training()

    async def local_update(
        self,
        update: UpdateId,
        groups: Sequence[RewardedGroup],
        *,
        version: PolicyVersion | None,
    ) -> LocalUpdateResult:
        result = self._learner.local_update(update, groups, version=version)
        await asyncio.sleep(0)
        return result

    async def state_digest(self) -> str:
        return self._learner.state_digest()

    async def policy_digest(self) -> str:
        return self._learner.policy_digest()

    async def reference_digest(self) -> str:
        return self._learner.reference_digest()

    @property
    def optimizer_step(self) -> int:
        return self._learner.optimizer_step
