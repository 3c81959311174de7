"""The step functions that the mode loops share. Each may be repeated after a crash.

A step ends in this order (spec A2): updates → step_done acknowledged → checkpoint staged if due →
publish → validation and metrics → release → the counter goes up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from perdure.core.errors import TrainingError
from perdure.core.faults import FaultPoint
from perdure.core.ids import GlobalStep, GroupId, LogPosition, OptimizerStep, UpdateId
from perdure.core.records import (
    Published,
    StepDone,
    UpdateFailed,
)
from perdure.core.trajectories import RewardedGroup
from perdure.experience import Decision, decide
from perdure.runtime.acknowledge import acknowledged
from perdure.trainers.context import TrainContext
from perdure.trainers.prompts import MAX_REFILL_ROUNDS, next_prompts
from perdure.trainers.sampling_rules import sampling_rules
from perdure.trainers.saving import stage_checkpoint_if_due
from perdure.trainers.step_metrics import merge_updates, rollout_metrics, sampling_metrics
from perdure.trainers.validation import validate_if_due


class WaitForGroups(Protocol):
    """Waits until so many of the oldest finished groups may be taken."""

    def __call__(self, ctx: TrainContext, step: GlobalStep, *, count: int) -> Awaitable[None]: ...


async def generate_batch(ctx: TrainContext, step: GlobalStep) -> None:
    """Submit what the step still needs and run it until enough groups are finished.

    Groups that failed, and those that the dynamic filter takes out, are evicted and each is
    replaced by one new prompt. Nobody waits for the disk here: the log keeps the order of appends,
    so what a batch needs is durable before it is.

    Raises:
        TrainingError: Groups keep being evicted.
    """
    state, rules = ctx.store.state, sampling_rules(ctx.config)
    decision = Decision()
    with ctx.timed("generate"):
        for _ in range(MAX_REFILL_ROUNDS):
            _submit_missing(ctx, step)
            await ctx.runtime.run_groups(ctx.store.open_groups())
            decision = decide(state, global_step=step, rules=rules)
            if not decision.evict:
                return
    group, reason = decision.evict[0]
    why = state.groups[group].reason or "all its rewards are equal"
    raise TrainingError(
        f"prompt groups were evicted in {MAX_REFILL_ROUNDS} rounds, the last one as {reason.value}"
        f" ({why})",
        where=f"global step {step}",
        rule="a failed session fails its group; it is never a zero reward",
        way_out="mend the verifier, then resume the run; other data or limits need a new run",
    )


def _submit_missing(ctx: TrainContext, step: GlobalStep) -> None:
    """Evict failed groups, pay for evictions, and submit what the step's updates still lack."""
    state = ctx.store.state
    decision = decide(state, global_step=step, rules=sampling_rules(ctx.config))
    if decision.evict:
        ctx.store.evict(decision.evict, global_step=step)
    taken = len(state.updates_of(step))
    remaining = ctx.config.trainer.local_updates_per_step - taken
    available = len(state.table.finished) + len(ctx.store.open_groups())
    missing = remaining * ctx.groups_per_update - available
    if missing <= 0:
        return
    prompts = next_prompts(ctx, step, count=missing)
    refills, fresh = prompts[: decision.refill], prompts[decision.refill :]
    if refills:
        ctx.store.refill(refills)
    if fresh:
        ctx.store.submit(fresh)
    ctx.faults.reach(FaultPoint.GROUPS_SUBMITTED)


async def take_groups(
    ctx: TrainContext, update: UpdateId, *, when: WaitForGroups | None = None
) -> list[RewardedGroup]:
    """The groups of one local update: the logged ones if it was taken before, else the oldest.

    ``when`` waits until they may be taken. The ``taken`` record is acknowledged before the groups
    are returned.
    """
    state = ctx.store.state
    if update not in state.taken:
        reference_digest = await ctx.runtime.reference_digest()
        if when is not None:
            await when(ctx, update.global_step, count=ctx.groups_per_update)
        # Nothing else gets a turn between the decision to take and the record of it.
        with ctx.timed("take"):
            future = ctx.store.take(
                update,
                groups=ctx.store.oldest_finished(ctx.groups_per_update),
                config_digest=ctx.config_digest,
                reference_digest=reference_digest,
                tokenizer_digest=ctx.task.tokenizer.digest,
            )
            await acknowledged(ctx.store, future)
            ctx.faults.reach(FaultPoint.BATCH_TAKEN)
    with ctx.timed("take"):
        return [ctx.store.rewarded_group(GroupId(g)) for g in state.taken[update].groups]


async def local_update(
    ctx: TrainContext, update: UpdateId, groups: Sequence[RewardedGroup]
) -> None:
    """Train one batch. A batch whose training raises is recorded, so that a second time is seen."""
    with ctx.timed("update"):
        if not ctx.step_updates:
            ctx.step_version = ctx.store.state.version_of(await ctx.runtime.policy_digest())
        try:
            result = await ctx.runtime.local_update(update, groups, version=ctx.step_version)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            failure = UpdateFailed(update, ctx.store.incarnation, reason)
            await acknowledged(ctx.store, ctx.store.append(failure))
            raise
    ctx.step_groups.extend(groups)
    ctx.step_updates.append(result)
    ctx.progress.local_updates += 1
    ctx.faults.reach(FaultPoint.LOCAL_UPDATE_DONE)


async def step_record(
    ctx: TrainContext, step: GlobalStep, *, sampling: Mapping[str, float]
) -> StepDone:
    """What the log says of a step whose local updates are complete.

    ``sampling`` are the metrics of how sampling stood at its end.
    """
    return StepDone(
        global_step=step,
        digest=await ctx.runtime.state_digest(),
        policy_digest=await ctx.runtime.policy_digest(),
        optimizer_step=OptimizerStep(ctx.runtime.optimizer_step),
        metrics={
            **rollout_metrics(ctx.step_groups, published=ctx.step_version),
            **merge_updates(ctx.step_updates),
            **sampling,
        },
        timings_s=dict(ctx.timings_s),
        skipped=tuple(reason for result in ctx.step_updates for reason in result.skipped),
    )


async def finish_step(ctx: TrainContext, step: GlobalStep) -> None:
    """Acknowledge ``step_done``; the step counts from here on."""
    # Without limits and with prompts that wait for nobody there is nothing to say of sampling.
    ahead = ctx.config.mode != "sync"
    sampling = sampling_metrics(ctx.store.state, step) if ahead else {}
    record = await step_record(ctx, step, sampling=sampling)
    await acknowledged(ctx.store, ctx.store.append(record))
    ctx.progress.complete(step)
    ctx.faults.reach(FaultPoint.STEP_DONE)
    shown = {key: record.metrics[key] for key in ("response_length",) if key in record.metrics}
    seconds = sum(record.timings_s.values())
    reward = record.metrics.get("reward", float("nan"))
    ctx.events("step", {"global_step": step, "reward": reward, "seconds": seconds, **shown})
    for warning in (ctx.signal.look(record.metrics), ctx.mismatch.look(record.metrics)):
        if warning is not None:
            ctx.events("warning", {"message": warning})


async def complete_step(ctx: TrainContext, step: GlobalStep) -> None:
    """Everything a step does after ``step_done``, in order; repeated as a whole after a crash."""
    stage_checkpoint_if_due(ctx, step)
    await publish_weights(ctx, step)
    await validate_if_due(ctx, step)
    if step > ctx.rows_upto:
        ctx.metrics.step(ctx.store.state.step_done[step])
        ctx.rows_upto = step
    ctx.store.release([GroupId(group.group) for group in ctx.step_groups])
    ctx.begin_step()


async def publish_weights(ctx: TrainContext, step: GlobalStep) -> None:
    """Publish the current weights. The same bytes keep their version; other bytes get a new one.

    The log has the version before it has tokens of it.
    """
    await ctx.runtime.wake_rollout()
    started_s = ctx.clock.monotonic_s()
    digest = await ctx.runtime.policy_digest()
    version = ctx.store.state.version_of(digest) or ctx.store.state.next_version
    logged: list[Future[LogPosition]] = []

    def announce() -> None:
        if ctx.store.state.version_of(digest) is None:
            record = Published(version=version, digest=digest, global_step=step)
            logged.append(ctx.store.append(record))

    with ctx.doing("publish"):
        await ctx.runtime.publish(version, announce=announce)
    for record in logged:
        await acknowledged(ctx.store, record)
    ctx.faults.reach(FaultPoint.WEIGHTS_PUBLISHED)
    seconds = ctx.clock.monotonic_s() - started_s
    ctx.events("published", {"version": version, "digest": digest, "seconds": seconds})
