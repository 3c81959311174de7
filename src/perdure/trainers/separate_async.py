"""separate_async: engines of their own generate through all local updates of a step.

The learner takes a batch whenever enough groups are finished; weights are published once per global
step, and unfinished sessions go on under them. While it waits for the first batch, and later where
that pays, the learner's devices generate as well.
"""

from __future__ import annotations

from perdure.core.ids import GlobalStep, LocalUpdate, UpdateId
from perdure.trainers.context import TrainContext
from perdure.trainers.lending import LearnerLending
from perdure.trainers.sampling import submit_prompts
from perdure.trainers.steps import complete_step, finish_step, local_update, take_groups


async def run(ctx: TrainContext) -> None:
    """Train until ``total_steps``.

    Consumes prompts of the task and the progress a restore left (perhaps in the middle of a step);
    produces log records, checkpoints and publications; waits for finished groups. Cancellation
    leaves the log as it is: what was acknowledged is continued by the next incarnation. An orderly
    stop comes between two local updates.
    """
    lending = LearnerLending(ctx)
    async with ctx.runtime.background_rollout():
        while ctx.progress.global_step < ctx.config.trainer.total_steps:
            step = GlobalStep(ctx.progress.global_step + 1)
            submit_prompts(ctx, step)
            updates = ctx.config.trainer.local_updates_per_step
            for index in range(ctx.progress.local_updates, updates):
                update = UpdateId(step, LocalUpdate(index))
                groups = await take_groups(ctx, update, when=lending.wait_for_groups)
                async with ctx.stop.finishing():
                    await local_update(ctx, update, groups)
            async with ctx.stop.finishing():
                await finish_step(ctx, step)
            await complete_step(ctx, step)
