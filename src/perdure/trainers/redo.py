"""Redo: batches logged after the restored checkpoint are trained again, without generating.

The same groups in the same order through the same update give the weights of the moment of the
crash, bit for bit in deterministic mode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from perdure.core.errors import RedoDivergedError
from perdure.core.faults import FaultPoint
from perdure.core.ids import GlobalStep, UpdateId
from perdure.core.records import Redone, StepDone
from perdure.runtime.acknowledge import acknowledged
from perdure.trainers.context import TrainContext
from perdure.trainers.saving import stage_checkpoint_if_due
from perdure.trainers.step_metrics import SAMPLING
from perdure.trainers.steps import local_update, step_record, take_groups


async def redo(ctx: TrainContext, *, at_frontier: Callable[[], Awaitable[None]]) -> None:
    """Train every ``taken`` batch beyond the progress again.

    Consumes the log; produces ``redone`` records and the due checkpoints. Ends behind the last
    logged local update, which may be in the middle of a step. Batches that were set aside as poison
    are passed over. Cancellation is harmless: the next incarnation redoes again.

    Args:
        at_frontier: Run once, when the last step that is done has been redone: the weights are then
            those that the step in progress was generated with.

    Raises:
        RedoDivergedError: Deterministic mode and a digest differs from the logged one.
    """
    updates = ctx.taken_beyond(ctx.progress.global_step)
    if not updates:
        await at_frontier()
        return
    done = [update for update in updates if update.global_step <= ctx.store.state.last_step]
    started_s = ctx.clock.monotonic_s()
    first, last = updates[0].global_step, updates[-1].global_step
    ctx.events("redo_started", {"from_step": first, "to_step": last})
    await _redo_all(ctx, done)
    if any(not record.equal for record in ctx.store.state.redone.values()):
        state = ctx.store.state
        ctx.metrics.rebuild(steps=state.curve(), evaluations=state.evaluated.values())
    await at_frontier()
    await _redo_all(ctx, updates[len(done) :])
    ctx.faults.reach(FaultPoint.REDO_DONE)
    seconds = ctx.clock.monotonic_s() - started_s
    ctx.events("redo_finished", {"local_updates": len(updates), "seconds": seconds})


async def _redo_all(ctx: TrainContext, updates: Sequence[UpdateId]) -> None:
    for update in updates:
        ctx.faults.reach(FaultPoint.REDO_STEP)
        async with ctx.stop.finishing():
            await _redo_update(ctx, update)


async def _redo_update(ctx: TrainContext, update: UpdateId) -> None:
    if ctx.store.state.is_poisoned(update):
        ctx.progress.local_updates += 1
    else:
        await local_update(ctx, update, await take_groups(ctx, update))
    logged = ctx.store.state.step_done.get(update.global_step)
    complete = ctx.progress.local_updates == ctx.config.trainer.local_updates_per_step
    if complete and logged is not None:
        await _confirm(ctx, update.global_step, logged)


async def _confirm(ctx: TrainContext, step: GlobalStep, logged: StepDone) -> None:
    """Compare a redone step with its record, and go on to the next."""
    sampling = {name: value for name, value in logged.metrics.items() if name in SAMPLING}
    again = await step_record(ctx, step, sampling=sampling)
    equal = again.digest == logged.digest
    if not equal and ctx.config.deterministic:
        raise diverged(f"global step {step}", again=again.digest, logged=logged.digest)
    record = Redone(
        step,
        again.digest,
        equal,
        ctx.store.incarnation,
        metrics=again.metrics,
        timings_s=again.timings_s,
    )
    await acknowledged(ctx.store, ctx.store.append(record))
    ctx.events("redone", {"global_step": step, "digest": again.digest, "equal": equal})
    ctx.progress.complete(step)
    stage_checkpoint_if_due(ctx, step)
    ctx.begin_step()


def diverged(where: str, *, again: str, logged: str) -> RedoDivergedError:
    """The error of work that was done again and came to other bits."""
    return RedoDivergedError(
        f"redone digest {again} differs from the logged {logged}",
        where=where,
        rule="in deterministic mode a redone step gives the same bits",
        way_out="resume on the CPU kind and library versions that run.json names, or go on from"
        " the checkpoint with `perdure resume RUN --no-redo`",
    )
