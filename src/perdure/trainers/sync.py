"""sync: rollout and learner share devices; a full batch is generated, then trained.

The engine sleeps while the learner updates, the new weights are published, and the engine wakes.
"""

from __future__ import annotations

from perdure.core.ids import GlobalStep, LocalUpdate, UpdateId
from perdure.trainers.context import TrainContext
from perdure.trainers.steps import (
    complete_step,
    finish_step,
    generate_batch,
    local_update,
    take_groups,
)


async def run(ctx: TrainContext) -> None:
    """Train until ``total_steps``.

    Consumes prompts of the task and the progress a restore left (perhaps in the middle of a step);
    produces log records, checkpoints and publications. Cancellation leaves the log as it is: what
    was acknowledged is continued by the next incarnation. An orderly stop comes between two steps.
    """
    while ctx.progress.global_step < ctx.config.trainer.total_steps:
        step = GlobalStep(ctx.progress.global_step + 1)
        await generate_batch(ctx, step)
        async with ctx.stop.finishing():
            await ctx.runtime.sleep_rollout()
            updates = ctx.config.trainer.local_updates_per_step
            for index in range(ctx.progress.local_updates, updates):
                update = UpdateId(step, LocalUpdate(index))
                groups = await take_groups(ctx, update)
                await local_update(ctx, update, groups)
            await finish_step(ctx, step)
        await complete_step(ctx, step)
