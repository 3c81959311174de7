"""Validation on held-out prompts: its own prompts, its own record, never mixed with training."""

from __future__ import annotations

import numpy as np

from perdure.core.errors import DamagedError, StorageError, TrainingError
from perdure.core.faults import FaultPoint
from perdure.core.ids import GlobalStep
from perdure.core.records import Evaluated
from perdure.core.rollout_api import SamplingParams
from perdure.core.trajectories import Trajectory
from perdure.runtime.acknowledge import acknowledged
from perdure.runtime.verdicts import Judge, VerdictError
from perdure.tasks.api import Prompt, RewardResult, Task
from perdure.trainers.config import RunConfig
from perdure.trainers.context import TrainContext

DEFAULT_PROMPTS = 512
"""Held-out prompts when the recipe does not say how many and the task has as many."""


def held_out_prompts(config: RunConfig, task: Task) -> list[Prompt]:
    """The prompts that validation asks; empty if it is turned off.

    Raises:
        ConfigError: The recipe asks for more than the task has.
    """
    asked = config.validation.prompts
    return task.held_out(DEFAULT_PROMPTS if asked is None else asked, or_fewer=asked is None)


async def validate_if_due(ctx: TrainContext, step: GlobalStep) -> None:
    """Validate before training, every N steps and at the end, once per (step, policy digest)."""
    every = ctx.config.validation.every_steps
    due = step in (0, ctx.config.trainer.total_steps) or (every > 0 and step % every == 0)
    if not due or not ctx.held_out:
        return
    digest = await ctx.runtime.policy_digest()
    if (step, digest) in ctx.store.state.evaluated:
        return
    started_s = ctx.clock.monotonic_s()
    with ctx.doing("validate"):
        metrics = await _validate(ctx)
    seconds = ctx.clock.monotonic_s() - started_s
    record = Evaluated(step, digest, metrics, {"validation": seconds})
    await acknowledged(ctx.store, ctx.store.append(record))
    ctx.faults.reach(FaultPoint.EVALUATED)
    ctx.metrics.evaluation(record)
    ctx.events(
        "evaluated", {"global_step": step, "accuracy": metrics["accuracy"], "seconds": seconds}
    )
    try:
        ctx.curve.refresh()
    except (StorageError, DamagedError) as error:
        # The picture is for people; its rows are safe.
        ctx.events("warning", {"message": f"the curve cannot be drawn: {error}"})


async def _validate(ctx: TrainContext) -> dict[str, float]:
    """Greedy answers to every held-out prompt, judged by the task's verifier.

    Returns:
        Means over the prompts: ``accuracy`` (of the part ``correct``), every other part of the
        verdicts by its name, ``reward`` and ``response_length`` (tokens); ``prompts`` counts them.
    """
    sampling = greedy(ctx.config, ctx.task)
    trajectories = await ctx.runtime.answer(ctx.held_out, sampling=sampling)
    judge = Judge(ctx.task, timeout_s=ctx.config.rollout.verifier_timeout_s)
    verdicts = [
        await judge_answer(judge, prompt, trajectory)
        for prompt, trajectory in zip(ctx.held_out, trajectories, strict=True)
    ]
    lengths = [len(trajectory.response_ids_T) for trajectory in trajectories]
    parts = {name for verdict in verdicts for name in verdict.parts if name != "correct"}
    return {
        **{n: float(np.mean([v.parts.get(n, 0.0) for v in verdicts])) for n in sorted(parts)},
        "accuracy": float(np.mean([verdict.parts["correct"] for verdict in verdicts])),
        "reward": float(np.mean([verdict.reward for verdict in verdicts])),
        "response_length": float(np.mean(lengths)),
        "prompts": float(len(verdicts)),
    }


def greedy(config: RunConfig, task: Task) -> SamplingParams:
    """How validation answers."""
    return SamplingParams(
        temperature=0.0,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=(task.tokenizer.eos_id,),
    )


async def judge_answer(judge: Judge, prompt: Prompt, trajectory: Trajectory) -> RewardResult:
    """The verdict on an answer.

    Raises:
        TrainingError: The verifier raises or is too slow, or its reward is not finite.
    """
    try:
        return await judge.verdict(prompt, trajectory.response_ids_T.tolist())
    except VerdictError as error:
        raise TrainingError(
            f"the {error}",
            where=f"held-out prompt {prompt.data_index} of task {prompt.task}",
            rule="a verifier judges every answer with a finite reward",
            way_out="mend the verifier, then resume the run",
        ) from error
