"""Answers outside training: validation, and looking at a trained policy. Nothing is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from perdure.core.errors import PerdureError
from perdure.core.ids import GroupId, SessionId
from perdure.core.rollout_api import GenerationRequest, RolloutEngine, SamplingParams
from perdure.core.trajectories import Trajectory
from perdure.runtime.trajectory_builder import trajectory_from_chunks
from perdure.tasks.api import Prompt


async def answer(
    engine: RolloutEngine, prompts: Sequence[Prompt], *, sampling: SamplingParams, seed: int
) -> list[Trajectory]:
    """One trajectory per prompt, in their order."""
    with one_error():
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_answer_one(engine, request, index))
                for index, request in enumerate(_requests(prompts, sampling, seed))
            ]
    return [task.result() for task in tasks]


def _requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, seed: int
) -> Generator[GenerationRequest]:
    for index, prompt in enumerate(prompts):
        yield GenerationRequest(
            request_id=f"validation/{index}",
            prompt_ids=prompt.prompt_ids,
            sampling=sampling,
            random_key=(seed, -1, index),
        )


async def _answer_one(engine: RolloutEngine, request: GenerationRequest, index: int) -> Trajectory:
    chunks = [chunk async for chunk in engine.generate(request)]
    session = SessionId(GroupId(index), 0)
    return trajectory_from_chunks(session, prompt_ids=request.prompt_ids, chunks=chunks)


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
