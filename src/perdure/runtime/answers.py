"""Answers outside training: validation, and looking at a trained policy. Nothing is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from perdure.agents.loops import SingleTurn
from perdure.core.agent_api import AgentLoop
from perdure.core.errors import InfrastructureError, PerdureError, TrainingError
from perdure.core.ids import GroupId, SessionId
from perdure.core.rollout_api import GenerationRequest, RolloutEngine, SamplingParams
from perdure.core.trajectories import Trajectory
from perdure.runtime.agent_session import LiveSession, Watch
from perdure.runtime.tool_calls import (
    Known,
    NoJournal,
    SessionCalls,
    SessionFailedError,
    ToolRules,
)
from perdure.runtime.trajectory_builder import TrajectoryBuilder
from perdure.tasks.api import Prompt
from perdure.tasks.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """How prompts are answered.

    Attributes:
        loop: Runs each session.
        tools: What loops may call.
        retries: How often a session whose engine or tool failed is tried again, at once.
    """

    sampling: SamplingParams
    seed: int
    loop: AgentLoop = field(default_factory=SingleTurn)
    tools: ToolRules = field(default_factory=ToolRules)
    retries: int = 0


async def answer(
    engine: RolloutEngine, prompts: Sequence[Prompt], *, tokenizer: Tokenizer, rules: AnswerRules
) -> list[Trajectory]:
    """One trajectory per prompt, in their order.

    Raises:
        InfrastructureError: An engine or a tool failed too often.
        TrainingError: A tool has a bug, or decoding failed.
    """
    answering = _Answering(engine, tokenizer, rules)
    with one_error():
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answering.one(prompt, index))
                for index, prompt in enumerate(prompts)
            ]
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class _Answering:
    engine: RolloutEngine
    tokenizer: Tokenizer
    rules: AnswerRules

    async def one(self, prompt: Prompt, index: int) -> Trajectory:
        builder = TrajectoryBuilder(SessionId(GroupId(index), 0), prompt.prompt_ids)
        known: Known = {}
        for attempt in range(self.rules.retries + 1):
            try:
                return await self._run(builder, known)
            except InfrastructureError:
                if attempt == self.rules.retries:
                    raise
            except SessionFailedError as error:
                raise TrainingError(str(error), where=f"validation prompt {index}") from error
        raise AssertionError("unreachable: the last attempt returns")

    async def _run(self, builder: TrajectoryBuilder, known: Known) -> Trajectory:
        rules, session = self.rules, builder.session
        calls = SessionCalls(session, 0, rules=rules.tools, journal=NoJournal(), known=known)
        live = LiveSession(
            builder,
            engine=self.engine,
            request=GenerationRequest(
                request_id=f"validation/{session.group}",
                prompt_ids=tuple(builder.prompt_ids),
                sampling=rules.sampling,
                random_key=(rules.seed, -1, session.group),
            ),
            tokenizer=self.tokenizer,
            calls=calls,
            watch=Watch(),
        )
        try:
            return builder.trajectory(await rules.loop.run(live))
        finally:
            await calls.end()


@contextmanager
def one_error() -> Generator[None]:
    """Of several tasks' errors raise one: a bug before a refusal, so that it is not hidden."""
    try:
        yield
    except ExceptionGroup as failures:
        first: Exception = failures.split(PerdureError)[1] or failures
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from failures
