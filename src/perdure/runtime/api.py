"""The runtime contract: everything a trainer loop asks of the machines it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from perdure.core.ids import PolicyVersion, SessionId, UpdateId
from perdure.core.rollout_api import SamplingParams
from perdure.core.trajectories import RewardedGroup, Trajectory
from perdure.experience import OpenGroup
from perdure.learner.api import Example, LocalUpdateResult
from perdure.rollout.members import MemberReport
from perdure.tasks.api import Prompt


@dataclass(frozen=True, slots=True)
class RunningSession:
    """A session in progress, for whoever asks why nothing moves.

    Attributes:
        tokens: How many it has so far.
        running_s: Seconds since it was started.
        silent_s: Seconds since its last token.
        doing: What it waits for, e.g. ``engine-0``.
    """

    session: SessionId
    tokens: int
    running_s: float
    silent_s: float
    doing: str


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """What the rollout pool has to do, for whoever thinks of helping it.

    Attributes:
        settled: Groups settled since the start.
        queued: Sessions in progress beyond the engines' slots.
        scaling: Slots with the learner's devices over slots without them; 1: it has no engine.
    """

    settled: int
    queued: int
    scaling: float


class Runtime(Protocol):
    """Rollout pool and learner group behind one face; ``local`` and cluster runtimes implement it.

    Every call of one runtime comes from one event loop.
    """

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Start the engines, and replace those that get lost, while the body runs.

        Raises:
            EngineLostError: They cannot be started or replaced; the body is cancelled.
        """
        ...

    async def run_groups(self, groups: Sequence[OpenGroup]) -> None:
        """Run all missing sessions and settle the groups in the experience log."""
        ...

    def background_rollout(self) -> AbstractAsyncContextManager[None]:
        """Run open groups in the background while the body runs, oldest first.

        A failure of the rollout cancels the body and is raised. On leaving, sessions that have not
        ended are cut short; what they have generated stays for the next incarnation.
        """
        ...

    def groups_submitted(self) -> None:
        """Tell the background that there are new groups."""
        ...

    async def wait_for_settled(self, *, beyond: int, timeout_s: float) -> int:
        """Wait until more than ``beyond`` groups were settled since the start; returns how many.

        Returns early, with the count as it is, when ``timeout_s`` have passed.
        """
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens that sessions in the background have received so far."""
        ...

    def running_sessions(self) -> list[RunningSession]:
        """Sessions in progress, the one started first in front."""
        ...

    def engines(self) -> tuple[MemberReport, ...]:
        """Every engine as it is now, lost ones included until they are replaced."""
        ...

    def rollout_load(self) -> RolloutLoad:
        """What the pool has to do at the moment."""
        ...

    async def lend_learner(self) -> bool:
        """Have the learner's devices generate as well; False: they cannot.

        Between updates only; ends with :meth:`reclaim_learner`.
        """
        ...

    async def reclaim_learner(self) -> None:
        """Give the devices back to the learner; what they generated goes on elsewhere."""
        ...

    async def interrupt_rollout(self) -> None:
        """End every request; sessions keep what they have and go on after a publication."""
        ...

    async def answer(
        self, prompts: Sequence[Prompt], *, sampling: SamplingParams
    ) -> list[Trajectory]:
        """One trajectory per prompt, outside training (validation); nothing is logged."""
        ...

    async def sleep_rollout(self) -> None:
        """Free the engines' weights and KV memory; no request may be running."""
        ...

    async def wake_rollout(self) -> None:
        """Restore the engines' memory; weights follow with :meth:`publish`."""
        ...

    async def publish(self, version: PolicyVersion, *, announce: Callable[[], None]) -> str:
        """Publish the learner's weights to all engines; returns the acknowledged digest.

        ``announce`` is called once an engine has acknowledged, before any of them serves.
        """
        ...

    async def supervised_step(self, step: int, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step of the supervised warm start."""
        ...

    async def begin_training(self) -> None:
        """End the warm start: fresh optimizer, frozen reference policy."""
        ...

    async def local_update(
        self,
        update: UpdateId,
        groups: Sequence[RewardedGroup],
        *,
        version: PolicyVersion | None,
    ) -> LocalUpdateResult:
        """Old and reference log-probabilities, values, advantages, critic and actor update.

        ``version`` is that of the weights the global step began with, None if they have none.
        """
        ...

    async def state_digest(self) -> str:
        """Digest of the learner's whole state (weights, optimizer, schedule, counters)."""
        ...

    async def policy_digest(self) -> str:
        """Digest of the policy weights alone."""
        ...

    async def reference_digest(self) -> str:
        """Digest of the reference policy; empty without one."""
        ...

    @property
    def optimizer_step(self) -> int:
        """Calls of the actor's ``optimizer.step()`` since :meth:`begin_training`."""
        ...
