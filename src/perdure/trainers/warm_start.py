"""The supervised warm start: a phase before training, with checkpoints of its own.

Its examples are keyed by position, so a crash costs at most the steps since its last checkpoint,
and those come out the same again.
"""

from __future__ import annotations

from perdure.core.faults import FaultPoint
from perdure.core.records import PhaseStep
from perdure.runtime.acknowledge import acknowledged
from perdure.trainers.context import TrainContext
from perdure.trainers.redo import diverged
from perdure.trainers.saving import stage_checkpoint

_PHASE = "warm_start"


async def warm_start(ctx: TrainContext) -> None:
    """Train on demonstrations from where the progress stands; then freeze the reference policy.

    Consumes ``task.demonstration``; produces ``phase_step`` records and warm checkpoints.
    Cancellation is harmless: the next incarnation repeats the steps since the last checkpoint.

    Raises:
        RedoDivergedError: Deterministic mode and a repeated step has another digest than before.
    """
    if ctx.progress.training:
        return
    config = ctx.config.learner.supervised
    if config.steps and not ctx.progress.warm_start_step:
        _announce_repetition(ctx)
    for step in range(ctx.progress.warm_start_step, config.steps):
        with ctx.timed("warm_start"):
            first = step * config.batch_size
            examples = [ctx.task.demonstration(first + i) for i in range(config.batch_size)]
            async with ctx.stop.finishing():
                metrics = await ctx.runtime.supervised_step(step + 1, examples)
                done = step + 1
                ctx.progress.warm_start_step = done
        ctx.events("warm_start_step", {"step": done})
        ctx.faults.reach(FaultPoint.WARM_START_STEP)
        if done % ctx.config.trainer.warm_start_log_every == 0 or done == config.steps:
            await _log_progress(ctx, done, metrics)
        if done % ctx.config.checkpoint.warm_start_every_steps == 0 and done < config.steps:
            stage_checkpoint(ctx, "warm", done, must=False)
    async with ctx.stop.finishing():
        await ctx.runtime.begin_training()
        ctx.progress.training = 1


def _announce_repetition(ctx: TrainContext) -> None:
    """Say that the steps of earlier incarnations are repeated, since no checkpoint holds them."""
    state = ctx.store.state
    if len(state.incarnations) > 1:
        logged = max((step for phase, step in state.phase_steps if phase == _PHASE), default=0)
        ctx.events("warm_start_again", {"logged_step": logged})


async def _log_progress(ctx: TrainContext, done: int, metrics: dict[str, float]) -> None:
    record = PhaseStep(
        phase=_PHASE,
        step=done,
        digest=await ctx.runtime.state_digest(),
        metrics=metrics,
        timings_s=dict(ctx.timings_s),
        final=done == ctx.config.learner.supervised.steps,
    )
    _confirm(ctx, record)
    await acknowledged(ctx.store, ctx.store.append(record))
    seconds = ctx.timings_s["warm_start"]
    ctx.begin_step()
    ctx.events("warm_start", {"step": done, "loss": metrics["loss"], "seconds": seconds})


def _confirm(ctx: TrainContext, again: PhaseStep) -> None:
    """Compare a repeated step with its record, which stays the one that counts."""
    logged = ctx.store.state.phase_steps.get((again.phase, again.step))
    if logged is None or logged.digest == again.digest:
        return
    where = f"warm start step {again.step}"
    if ctx.config.deterministic:
        raise diverged(where, again=again.digest, logged=logged.digest)
    message = f"{where}: redone digest {again.digest} differs from the logged {logged.digest}"
    ctx.events("warning", {"message": message})
