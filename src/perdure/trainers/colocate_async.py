"""colocate_async: rollout and learner take turns on the same devices; prompts run ahead.

Agent loops, tools and verifiers go on while the learner has the devices. When enough groups are
finished, all requests are ended, the engine sleeps, the learner updates, the new weights are
published, and unfinished sessions go on from what they have.
"""

from __future__ import annotations

from perdure.core.ids import GlobalStep, LocalUpdate, UpdateId
from perdure.trainers.context import TrainContext
from perdure.trainers.sampling import groups_at_hand, submit_prompts, wait_for_groups
from perdure.trainers.steps import complete_step, finish_step, local_update, take_groups


async def run(ctx: TrainContext) -> None:
    """Train until ``total_steps``.

    Consumes prompts of the task and the progress a restore left (perhaps in the middle of a step);
    produces log records, checkpoints and publications; waits for finished groups. Cancellation
    leaves the log as it is: what was acknowledged is continued by the next incarnation. An orderly
    stop comes between two steps.
    """
    updates = ctx.config.trainer.local_updates_per_step
    async with ctx.runtime.background_rollout():
        while ctx.progress.global_step < ctx.config.trainer.total_steps:
            step = GlobalStep(ctx.progress.global_step + 1)
            submit_prompts(ctx, step)
            # While the learner has the devices no group can come: the whole step is needed.
            missing = (updates - len(ctx.store.state.updates_of(step))) * ctx.groups_per_update
            await wait_for_groups(ctx, step, count=missing)
            async with ctx.stop.finishing():
                await ctx.runtime.interrupt_rollout()
                await ctx.runtime.sleep_rollout()
                for index in range(ctx.progress.local_updates, updates):
                    update = UpdateId(step, LocalUpdate(index))
                    groups = await take_groups(ctx, update, when=groups_at_hand)
                    await local_update(ctx, update, groups)
                await finish_step(ctx, step)
            await complete_step(ctx, step)
