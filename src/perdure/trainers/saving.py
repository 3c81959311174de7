"""When and how the trainers stage checkpoints."""

from __future__ import annotations

import asyncio

from perdure.checkpoint import StagedInfo
from perdure.core.ids import CheckpointName, GlobalStep
from perdure.core.records import Checkpointed
from perdure.trainers.context import TrainContext


async def stage_checkpoint_if_due(ctx: TrainContext, step: GlobalStep) -> None:
    """Stage after ``step`` every N steps or T seconds, whichever comes first.

    Steps 0 and the last are always due, and waited for. The others become durable in the
    background, and one is skipped when both arenas are busy.
    """
    if ("train", step) in ctx.staged | {(c.phase, c.step) for c in _trusted(ctx)}:
        return
    config = ctx.config.checkpoint
    edge = step in (0, ctx.config.trainer.total_steps)
    elapsed_s = ctx.clock.monotonic_s() - ctx.last_checkpoint_s
    if edge or step % config.every_steps == 0 or elapsed_s >= config.every_s:
        await stage_checkpoint(ctx, "train", step, wait=edge)


async def stage_checkpoint(ctx: TrainContext, phase: str, step: int, *, wait: bool) -> None:
    """Stage the present state as ``phase``/``step``.

    Its log position is the end of the step's ``step_done`` record: redo starts behind it, also when
    the step itself is being redone and the log goes on far beyond.
    """
    state = ctx.store.state
    done = state.step_done.get(GlobalStep(step)) if phase == "train" else None
    position = state.position_of(done) if done is not None else None
    info = StagedInfo(
        position=position or ctx.store.position,
        clocks={
            "global_step": ctx.progress.global_step,
            "local_update": ctx.progress.local_updates,
            "optimizer_step": ctx.runtime.optimizer_step,
            "policy_version": state.newest_version,
        },
        lineage={
            "run_id": ctx.run.run_id,
            "incarnation": ctx.store.incarnation,
            "parent": state.incarnations[-1].parent,
        },
        algorithm=ctx.config.learner.algorithm,
        config_digest=ctx.config_digest,
        dataset_digest=ctx.task.dataset_digest,
        experience={
            "next_group": state.table.next_group,
            "next_data_index": state.table.next_data_index,
        },
        environment={"threads": ctx.config.threads, **ctx.run.versions},
    )
    name = CheckpointName(phase, step, ctx.store.incarnation)
    if wait:
        await asyncio.to_thread(ctx.checkpoints.stage, name, info=info, must=True)
    else:
        ctx.checkpoints.stage(name, info=info)
    ctx.staged.add((phase, step))
    ctx.last_checkpoint_s = ctx.clock.monotonic_s()


def _trusted(ctx: TrainContext) -> list[Checkpointed]:
    return [c for c in ctx.store.committed() if c.directory not in ctx.distrusted]
