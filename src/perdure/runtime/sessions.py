"""Runs the sessions of prompt groups: engine tokens in, rewarded durable trajectories out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from perdure.core.errors import TrainingError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import PolicyVersion, SessionId
from perdure.core.record_types import GroupOutcome, StopReason
from perdure.core.records import GroupSettled, Submitted
from perdure.core.rollout_api import (
    GenerationChunk,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
)
from perdure.core.trajectories import Segment, Trajectory
from perdure.experience import ExperienceStore, FinishedSession, OpenGroup
from perdure.tasks.api import Prompt, Task

_LOGGED_TOGETHER = 128
"""At most so many finished sessions wait to be logged in one go, which costs far less CPU than
logging them one by one between the kernels of a model."""
_LINGER_S = 0.1
"""How long a finished session waits for others at most."""


class SessionRunner:
    """Single-turn agent loop: one prompt, one answer, one verdict.

    A session that fails makes its group fail with a reason; it never becomes a zero reward.
    Finished sessions are logged many at a time, at the latest after a tenth of a second.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        store: ExperienceStore,
        task: Task,
        sampling: SamplingParams,
        seed: int,
        faults: FaultHook,
    ) -> None:
        self._engine = engine
        self._store = store
        self._task = task
        self._sampling = sampling
        self._seed = seed
        self._faults = faults
        self._finished: list[FinishedSession] = []
        self._settled: list[GroupSettled] = []

    async def run_groups(self, groups: Sequence[OpenGroup]) -> None:
        """Run every missing session and settle the groups.

        Consumes engine slots; produces sessions_done and group_settled records, which may still be
        on their way to the disk on return (``store.flush`` waits for them). Cancellation leaves the
        finished sessions in the log and the others missing.
        """
        try:
            async with asyncio.TaskGroup() as owner:
                pacer = owner.create_task(self._log_now_and_then())
                async with asyncio.TaskGroup() as tasks:
                    for group in groups:
                        tasks.create_task(self._run_group(group))
                pacer.cancel()
        finally:
            self._log_finished()

    async def _run_group(self, group: OpenGroup) -> None:
        self._store.start_sessions(group.missing)
        async with asyncio.TaskGroup() as tasks:
            sessions = [
                tasks.create_task(self._run_session(group.submitted, session))
                for session in group.missing
            ]
        errors = [e for session in sessions if (e := session.result()) is not None]
        outcome = GroupOutcome.FAILED if errors else GroupOutcome.FINISHED
        reason = "; ".join(errors)[:500]
        self._settled.append(GroupSettled(group.submitted.group, outcome, reason))

    async def _log_now_and_then(self) -> None:
        """Bounds how long a finished session waits. Runs until cancelled."""
        while True:
            await asyncio.sleep(_LINGER_S)
            self._log_finished()

    async def _run_session(self, submitted: Submitted, session: SessionId) -> str | None:
        """Run one session; returns the reason when it failed."""
        trajectory = await self._generate(submitted, session)
        try:
            verdict = self._task.verify(prompt_of(submitted), trajectory.response_ids_T.tolist())
        except Exception as error:  # noqa: BLE001 - a verifier is user code; the reason is kept
            return f"{session.key()}: verifier raised {type(error).__name__}: {error}"
        if not math.isfinite(verdict.reward):
            return f"{session.key()}: verifier returned reward {verdict.reward}"
        self._finished.append(FinishedSession(trajectory, verdict.reward, verdict.parts))
        if len(self._finished) >= _LOGGED_TOGETHER:
            self._log_finished()
        self._faults.reach(FaultPoint.SESSION_FINISHED)
        return None

    def _log_finished(self) -> None:
        """Nobody waits for this append alone: a failure is final and surfaces at a later call."""
        finished, self._finished = self._finished, []
        settled, self._settled = self._settled, []
        if finished or settled:
            self._store.sessions_done(finished, settled=settled)

    async def _generate(self, submitted: Submitted, session: SessionId) -> Trajectory:
        request = GenerationRequest(
            request_id=session.key(),
            prompt_ids=submitted.prompt_ids,
            sampling=self._sampling,
            random_key=(self._seed, session.group, session.index),
        )
        chunks = [chunk async for chunk in self._engine.generate(request)]
        return trajectory_from_chunks(session, prompt_ids=submitted.prompt_ids, chunks=chunks)


def prompt_of(submitted: Submitted) -> Prompt:
    """The prompt as the log has it; the data set is not needed again."""
    return Prompt(
        prompt_ids=submitted.prompt_ids,
        task=submitted.task,
        answer=submitted.answer,
        data_index=submitted.data_index,
    )


def trajectory_from_chunks(
    session: SessionId, *, prompt_ids: Sequence[int], chunks: Sequence[GenerationChunk]
) -> Trajectory:
    """Join the chunks of one finished generation; neighbours of one version share a segment.

    Raises:
        TrainingError: The stream ended without a stop reason or was aborted.
    """
    stop_reason = chunks[-1].stop_reason if chunks else None
    if stop_reason is None or stop_reason is StopReason.ABORTED:
        raise TrainingError(f"generation ended with {stop_reason}", where=session.key())
    response_ids = np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int32)
    return Trajectory(
        session=session,
        prompt_ids_P=np.asarray(prompt_ids, dtype=np.int32),
        response_ids_T=response_ids,
        logprobs_T=np.concatenate([chunk.logprobs for chunk in chunks]).astype(np.float32),
        loss_mask_T=np.ones(len(response_ids), dtype=np.uint8),
        segments=_segments(chunks),
        stop_reason=stop_reason,
    )


def _segments(chunks: Sequence[GenerationChunk]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk.token_ids)
        if segments and segments[-1].version == chunk.version:
            segments[-1] = Segment(chunk.version, segments[-1].start, end)
        elif end > start:
            segments.append(Segment(PolicyVersion(chunk.version), start, end))
    return tuple(segments)
