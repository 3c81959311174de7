"""Runs the sessions of prompt groups: engine tokens in, rewarded durable trajectories out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure.core.errors import InfrastructureError
from perdure.core.faults import FaultPoint
from perdure.core.ids import SessionId
from perdure.core.record_types import GroupOutcome, StopReason
from perdure.core.records import GroupSettled, Submitted
from perdure.core.rollout_api import GenerationRequest, RolloutEngine, SamplingParams
from perdure.core.trajectories import Trajectory
from perdure.experience import FinishedSession, OpenGroup
from perdure.runtime.api import RunningSession
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.trajectory_builder import TrajectoryBuilder, final_reason
from perdure.tasks.api import Prompt

_LOGGED_TOGETHER = 128
"""At most so many finished sessions wait to be logged in one go, which costs far less CPU than
logging them one by one between the kernels of a model."""
_LINGER_S = 0.1
"""How long a finished session waits for others at most."""


@dataclass(frozen=True, slots=True)
class SessionRules:
    """How sessions draw tokens, and what becomes of those that fail.

    Attributes:
        retries: How often a session whose engine, tool or connection failed is run again.
        retry_pause_s: Before the first repetition; doubles with each.
    """

    sampling: SamplingParams
    seed: int
    retries: int = 2
    retry_pause_s: float = 0.5


@dataclass(slots=True)
class _Watch:
    """What is known of a session in progress."""

    started_s: float
    last_token_s: float
    tokens: int = 0
    doing: str = "generating"


class SessionRunner:
    """Single-turn agent loop: one prompt, one answer, one verdict.

    A session that fails makes its group fail with a reason; it never becomes a zero reward, and its
    siblings are run to their end.
    """

    def __init__(self, engine: RolloutEngine, *, parts: RuntimeParts, rules: SessionRules) -> None:
        self.rules = rules
        self.store = parts.store
        self._engine = engine
        self._task = parts.task
        self._clock = parts.clock
        self._faults = parts.faults
        self._events = parts.events
        self._finished: list[FinishedSession] = []
        self._settled: list[GroupSettled] = []
        self._running: dict[SessionId, _Watch] = {}
        self._ended = asyncio.Event()
        self.generated_tokens = 0
        """Received from engines so far."""
        self.on_settled: Callable[[int], None] | None = None
        """Told how many groups were settled, after they have been logged."""

    async def run_groups(self, groups: Sequence[OpenGroup]) -> None:
        """Run every missing session and settle the groups.

        Consumes engine slots; produces sessions_done and group_settled records, which may still be
        on their way to the disk on return (``store.flush`` waits for them). Cancellation leaves the
        finished sessions in the log and the others missing.
        """
        try:
            async with asyncio.TaskGroup() as owner:
                pacer = owner.create_task(self.log_as_they_end(_LINGER_S))
                async with asyncio.TaskGroup() as tasks:
                    for group in groups:
                        tasks.create_task(self.run_group(group))
                pacer.cancel()
        finally:
            self.log_finished()

    async def run_group(self, group: OpenGroup) -> None:
        """Run the missing sessions of a group; it settles with the next :meth:`log_finished`."""
        self.store.start_sessions(group.missing)
        async with asyncio.TaskGroup() as tasks:
            sessions = [
                tasks.create_task(self._run_session(group.submitted, session))
                for session in group.missing
            ]
        errors = [e for session in sessions if (e := session.result()) is not None]
        outcome = GroupOutcome.FAILED if errors else GroupOutcome.FINISHED
        reason = "; ".join(errors)[:500]
        self._settled.append(GroupSettled(group.submitted.group, outcome, reason))
        self._ended.set()

    def log_finished(self) -> None:
        """Log what has ended since the last time.

        Nobody waits for this append alone: a failure is final and surfaces at a later call.
        """
        self._ended.clear()
        finished, self._finished = self._finished, []
        settled, self._settled = self._settled, []
        if finished or settled:
            self.store.sessions_done(finished, settled=settled)
        if settled and self.on_settled is not None:
            self.on_settled(len(settled))

    async def log_as_they_end(self, linger_s: float) -> None:
        """Log what ends, ``linger_s`` after the first of it at the latest. Runs until cancelled."""
        while True:
            await self._ended.wait()
            await asyncio.sleep(linger_s)
            self.log_finished()

    def running(self) -> list[RunningSession]:
        """Sessions in progress, the one started first in front."""
        now_s = self._clock.monotonic_s()
        return [
            RunningSession(
                session,
                tokens=watch.tokens,
                running_s=now_s - watch.started_s,
                silent_s=now_s - watch.last_token_s,
                doing=watch.doing,
            )
            for session, watch in self._running.items()
        ]

    async def _run_session(self, submitted: Submitted, session: SessionId) -> str | None:
        """Run one session, again if what it ran on failed; returns the reason when it failed."""
        now_s = self._clock.monotonic_s()
        watch = self._running[session] = _Watch(now_s, now_s)
        try:
            for attempt in range(self.rules.retries + 1):
                try:
                    trajectory = await self._generate(submitted, session, watch)
                    return self._judge(submitted, trajectory)
                except InfrastructureError as error:
                    reason = f"{session.key()}: {error.what}"
                    if attempt == self.rules.retries:
                        return f"{reason} (attempt {attempt + 1})"
                    fields: dict[str, object] = {"session": session.key(), "reason": error.what}
                    self._events("session_retried", fields)
                    watch.doing = f"pausing after {error.what}"
                    await asyncio.sleep(self.rules.retry_pause_s * 2**attempt)
            raise AssertionError("unreachable: the last attempt returns")
        finally:
            del self._running[session]

    def _judge(self, submitted: Submitted, trajectory: Trajectory) -> str | None:
        key = trajectory.session.key()
        try:
            verdict = self._task.verify(prompt_of(submitted), trajectory.response_ids_T.tolist())
        except Exception as error:  # noqa: BLE001 - a verifier is user code; the reason is kept
            return f"{key}: verifier raised {type(error).__name__}: {error}"
        if not math.isfinite(verdict.reward):
            return f"{key}: verifier returned reward {verdict.reward}"
        self._finished.append(FinishedSession(trajectory, verdict.reward, verdict.parts))
        self._ended.set()
        if len(self._finished) >= _LOGGED_TOGETHER:
            self.log_finished()
        self._faults.reach(FaultPoint.SESSION_FINISHED)
        return None

    async def _generate(
        self, submitted: Submitted, session: SessionId, watch: _Watch
    ) -> Trajectory:
        request = GenerationRequest(
            request_id=session.key(),
            prompt_ids=submitted.prompt_ids,
            sampling=self.rules.sampling,
            random_key=(self.rules.seed, session.group, session.index),
        )
        watch.doing = "generating"
        builder = TrajectoryBuilder(session, submitted.prompt_ids)
        reason: StopReason | None = None
        async for chunk in self._engine.generate(request):
            builder.generated(chunk)
            reason = chunk.stop_reason
            self.generated_tokens += len(chunk.token_ids)
            watch.tokens = builder.length
            watch.last_token_s = self._clock.monotonic_s()
        return builder.trajectory(final_reason(reason, session))


def prompt_of(submitted: Submitted) -> Prompt:
    """The prompt as the log has it; the data set is not needed again."""
    return Prompt(
        prompt_ids=submitted.prompt_ids,
        task=submitted.task,
        answer=submitted.answer,
        data_index=submitted.data_index,
    )
