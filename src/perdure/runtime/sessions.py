"""Runs the sessions of prompt groups: engine tokens in, rewarded durable trajectories out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from perdure.agents.loops import SingleTurn
from perdure.core.agent_api import AgentLoop
from perdure.core.errors import InfrastructureError
from perdure.core.experience_records import (
    GroupSettled,
    Submitted,
    ToolResult,
)
from perdure.core.faults import FaultPoint
from perdure.core.ids import SessionId
from perdure.core.record_types import GroupOutcome, StopReason
from perdure.core.rollout_api import GenerationRequest, RolloutEngine, SamplingParams
from perdure.core.trajectories import Trajectory
from perdure.experience import Begun, ExperienceStore, FinishedSession, OpenGroup
from perdure.runtime.agent_session import LiveSession, Watch
from perdure.runtime.answers import AnswerRules, answer
from perdure.runtime.api import RunningSession
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.session_log import SessionLog
from perdure.runtime.tool_calls import (
    HistoryError,
    Known,
    SessionCalls,
    SessionFailedError,
    ToolRules,
)
from perdure.runtime.trajectory_builder import TrajectoryBuilder
from perdure.runtime.verdicts import Judge, VerdictError, VerdictLateError
from perdure.tasks.api import Prompt

_LINGER_S = 0.1
"""How long a finished session waits for others at most, when nobody trains meanwhile."""


@dataclass(frozen=True, slots=True)
class SessionRules:
    """How sessions draw tokens, and what becomes of those that are interrupted or fail.

    Attributes:
        loop: Runs each session.
        tools: What loops may call.
        retries: How often a session whose engine, tool or connection failed is tried again.
        retry_pause_s: Before the first repetition; doubles with each.
        partial_tokens: So many new tokens of a session are logged before it is done; None: only
            those in front of a tool call.
        continues: A session that was interrupted goes on from what it has; otherwise it starts
            again from its prompt, and its journaled calls are not made again.
        deterministic: A session that starts again says the same, so that its calls are the same.
        verifier_timeout_s: Longest wait for a verdict.
    """

    sampling: SamplingParams
    seed: int
    loop: AgentLoop = field(default_factory=SingleTurn)
    tools: ToolRules = field(default_factory=ToolRules)
    retries: int = 2
    retry_pause_s: float = 0.5
    partial_tokens: int | None = None
    continues: bool = True
    deterministic: bool = False
    verifier_timeout_s: float = 60.0

    @property
    def logs_partials(self) -> bool:
        """Whether tokens of unfinished sessions are logged."""
        return self.continues and self.partial_tokens is not None


@dataclass(slots=True)
class _Session:
    """A session in progress, over all its tries in this process."""

    submitted: Submitted
    builder: TrajectoryBuilder
    known: Known
    watch: Watch

    @property
    def id(self) -> SessionId:
        return self.builder.session

    def start_again(self, attempt: int) -> None:
        """From the prompt; only the same attempt may use what was journaled."""
        if attempt != self.builder.attempt:
            self.known.clear()
        self.builder = TrajectoryBuilder(self.id, self.submitted.prompt_ids, attempt=attempt)


class SessionRunner:
    """Runs an agent loop for each session, and has the task judge what comes out.

    A session that fails makes its group fail with a reason; it never becomes a zero reward, and its
    siblings are run to their end.
    """

    def __init__(self, engine: RolloutEngine, *, parts: RuntimeParts, rules: SessionRules) -> None:
        self.rules = rules
        self.store: ExperienceStore = parts.store
        self.log = SessionLog(parts.store)
        self.judge = Judge(parts.task, timeout_s=rules.verifier_timeout_s)
        self._engine = engine
        self._task = parts.task
        self._clock = parts.clock
        self._faults = parts.faults
        self._events = parts.events
        self._running: dict[SessionId, _Session] = {}
        self.on_session_end: Callable[[], None] | None = None
        """Told when a session runs no more, whatever became of it."""
        self.generated_tokens = 0
        """Received from engines so far."""

    async def run_groups(self, groups: Sequence[OpenGroup]) -> None:
        """Run every missing session and settle the groups.

        Consumes engine slots; produces what :class:`SessionLog` appends, which may still be
        on its way to the disk on return (``store.flush`` waits for it). Cancellation leaves the
        finished sessions and what the others have in the log.
        """
        try:
            async with asyncio.TaskGroup() as owner:
                pacer = owner.create_task(self.log.run(_LINGER_S))
                async with asyncio.TaskGroup() as tasks:
                    for group in groups:
                        tasks.create_task(self.run_group(group))
                pacer.cancel()
        finally:
            self.log.flush()

    async def run_group(self, group: OpenGroup) -> None:
        """Run the missing sessions of a group; it settles with the next flush of the log."""
        self.store.start_sessions(group.missing)
        sessions = self._sessions(group)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._run_session(session)) for session in sessions]
        errors = [e for session in running if (e := session.result()) is not None]
        outcome = GroupOutcome.FAILED if errors else GroupOutcome.FINISHED
        reason = "; ".join(errors)[:500]
        self.log.settled(GroupSettled(group.submitted.group, outcome, reason))

    async def answer(
        self, prompts: Sequence[Prompt], *, sampling: SamplingParams
    ) -> list[Trajectory]:
        """One trajectory per prompt, by the same loop; nothing is logged. Raises as `answer`."""
        rules = self.rules
        return await answer(
            self._engine,
            prompts,
            tokenizer=self._task.tokenizer,
            rules=AnswerRules(sampling, rules.seed, rules.loop, rules.tools, rules.retries),
        )

    def running(self) -> list[RunningSession]:
        """Sessions in progress, the one started first in front."""
        now_s = self._clock.monotonic_s()
        return [
            RunningSession(
                session,
                tokens=some.watch.tokens,
                running_s=now_s - some.watch.started_s,
                silent_s=now_s - some.watch.last_token_s,
                doing=some.watch.doing,
            )
            for session, some in self._running.items()
        ]

    def _sessions(self, group: OpenGroup) -> list[_Session]:
        """The missing sessions, each with what it has."""
        continued = [session for session in group.begun if self.rules.continues]
        prefixes = self.store.prefixes(continued) if continued else {}
        prompt_ids, now_s = group.submitted.prompt_ids, self._clock.monotonic_s()
        sessions: list[_Session] = []
        for one in group.missing:
            begun, prefix = group.begun.get(one), prefixes.get(one)
            attempt = 0 if begun is None else self._attempt(one, begun)
            builder = TrajectoryBuilder(one, prompt_ids, attempt=attempt)
            if prefix is not None:
                builder = TrajectoryBuilder.behind(prefix, prompt_ids)
            known = {} if begun is None else self.store.tool_results(one)
            session = _Session(group.submitted, builder, known, Watch(now_s, now_s))
            session.watch.received = partial(self._received, session)
            sessions.append(session)
        return sessions

    def _attempt(self, session: SessionId, begun: Begun) -> int:
        """The attempt to be run; a new one if this one's tokens are there and not wanted."""
        if self.rules.continues or not begun.tokens:
            return begun.attempt
        why = "partial trajectories are not continued"
        self.store.restart_session(session, attempt=begun.attempt + 1, reason=why)
        return begun.attempt + 1

    async def _run_session(self, session: _Session) -> str | None:
        """Run one session, again if what it ran on failed; returns the reason when it failed."""
        self._running[session.id] = session
        key = session.id.key()
        try:
            for attempt in range(self.rules.retries + 1):
                try:
                    await self._finish(session)
                    return None
                except (SessionFailedError, VerdictError) as error:
                    return f"{key}: {error}"
                except HistoryError as error:
                    reason = str(error)
                    self._restart(session, reason)
                except InfrastructureError as error:
                    reason = error.what
                    if not self.rules.continues:
                        self._start_again(session, reason)
                if attempt == self.rules.retries:
                    return f"{key}: {reason} (attempt {attempt + 1})"
                self._events("session_retried", {"session": key, "reason": reason})
                session.watch.doing = f"pausing after {reason}"
                await asyncio.sleep(self.rules.retry_pause_s * 2**attempt)
            raise AssertionError("unreachable: the last attempt returns")
        except asyncio.CancelledError:
            if self.rules.logs_partials:
                self.log.grown(session.builder)
            raise
        finally:
            del self._running[session.id]
            if self.on_session_end is not None:
                self.on_session_end()

    def _start_again(self, session: _Session, reason: str) -> None:
        """From the prompt; as another attempt if tools know what this one said."""
        if session.builder.logged:
            self._restart(session, reason)
        else:
            session.start_again(session.builder.attempt)

    def _restart(self, session: _Session, reason: str) -> None:
        self.log.flush()
        attempt = session.builder.attempt + 1
        self.store.restart_session(session.id, attempt=attempt, reason=reason)
        session.start_again(attempt)

    async def _finish(self, session: _Session) -> None:
        """Bring a session to its end and judge it."""
        calls = SessionCalls(
            session.id,
            session.builder.attempt,
            rules=self.rules.tools,
            journal=_Journal(self.log, session, self.rules),
            known=session.known,
        )
        try:
            reason = await self.rules.loop.run(self._live(session, calls))
        finally:
            await calls.end()
        await self._settle(session, reason)

    def _live(self, session: _Session, calls: SessionCalls) -> LiveSession:
        submitted, rules = session.submitted, self.rules
        request = GenerationRequest(
            request_id=session.id.key(),
            prompt_ids=submitted.prompt_ids,
            sampling=rules.sampling,
            random_key=(rules.seed, session.id.group, session.id.index),
        )
        return LiveSession(
            session.builder,
            engine=self._engine,
            request=request,
            tokenizer=self._task.tokenizer,
            calls=calls,
            watch=session.watch,
        )

    def _received(self, session: _Session, count: int) -> None:
        builder, watch = session.builder, session.watch
        self.generated_tokens += count
        watch.tokens = builder.length
        watch.last_token_s = self._clock.monotonic_s()
        every = self.rules.partial_tokens
        if every is not None and self.rules.continues and builder.length >= builder.logged + every:
            self.log.grown(builder)

    async def _settle(self, session: _Session, reason: StopReason) -> None:
        trajectory = session.builder.trajectory(reason)
        session.watch.doing = "judging"
        response_ids = trajectory.response_ids_T.tolist()
        try:
            verdict = await self.judge.verdict(prompt_of(session.submitted), response_ids)
        except VerdictLateError as error:
            self._events("warning", {"message": f"session {session.id.key()} has failed: {error}"})
            raise
        self.log.finished(FinishedSession(trajectory, verdict.reward, verdict.parts))
        self._faults.reach(FaultPoint.SESSION_FINISHED)


@dataclass(frozen=True, slots=True)
class _Journal:
    """Results of one session's calls, each behind the tokens that asked for it."""

    log: SessionLog
    session: _Session
    rules: SessionRules

    async def result(self, record: ToolResult) -> None:
        if self.rules.continues:
            self.log.grown(self.session.builder)
        await self.log.result(record)

    async def durable(self) -> None:
        # Of a deterministic session the journal alone says it: its tokens come again.
        if not self.rules.deterministic:
            self.log.grown(self.session.builder)
        await self.log.durable()


def prompt_of(submitted: Submitted) -> Prompt:
    """The prompt as the log has it; the data set is not needed again."""
    return Prompt(
        prompt_ids=submitted.prompt_ids,
        task=submitted.task,
        answer=submitted.answer,
        data_index=submitted.data_index,
    )
