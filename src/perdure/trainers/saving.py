"""When and how the trainers stage checkpoints."""

from __future__ import annotations

from perdure.checkpoint import CheckpointOptions, StagedInfo
from perdure.checkpoint.keep import Best, Keep
from perdure.core.errors import DamagedError, StorageError
from perdure.core.ids import CheckpointName, GlobalStep, LogPosition, PolicyVersion
from perdure.core.records import Checkpointed, ControlRecord
from perdure.runtime.log_reach import log_end
from perdure.trainers.checkpoint_config import CheckpointConfig
from perdure.trainers.context import TrainContext


def checkpoint_options(config: CheckpointConfig) -> CheckpointOptions:
    """Bounds of the checkpointer, as a recipe sets them."""
    return CheckpointOptions(keep=rules_of(config), writer=config.writer, arenas=config.arenas)


def rules_of(config: CheckpointConfig) -> Keep:
    """Which checkpoints stay, as a recipe sets it."""
    best = None
    if config.keep_best is not None:
        best = Best(config.keep_best, config.keep_best_mode, config.keep_best_count)
    return Keep(config.keep, config.keep_every_steps, best)


def stage_checkpoint_if_due(ctx: TrainContext, step: GlobalStep) -> None:
    """Stage after ``step`` every N steps or T seconds, whichever comes first.

    Steps 0 and the last are always due, and waited for. The others become durable in the
    background, and one is skipped when all arenas are busy.
    """
    if _is_saved(ctx, "train", step):
        return
    config = ctx.config.checkpoint
    edge = step in (0, ctx.config.trainer.total_steps)
    elapsed_s = ctx.clock.monotonic_s() - ctx.last_checkpoint_s
    if edge or step % config.every_steps == 0 or elapsed_s >= config.every_s:
        stage_checkpoint(ctx, "train", step, must=edge)


def save_at_stop(ctx: TrainContext) -> None:
    """Save the state that the run is stopped in, unless a checkpoint has it, and wait for it.

    Between two local updates of one step there is nothing to save: redo covers what is missing.
    """
    progress = ctx.progress
    phase = "train" if progress.training else "warm"
    step = progress.global_step if progress.training else progress.warm_start_step
    if progress.local_updates or (phase == "warm" and step == 0) or _is_saved(ctx, phase, step):
        return
    try:
        stage_checkpoint(ctx, phase, step, must=True)
    except (StorageError, DamagedError) as error:
        ctx.events("warning", {"message": f"no checkpoint at the stop: {error}"})


def _is_saved(ctx: TrainContext, phase: str, step: int) -> bool:
    return (phase, step) in ctx.staged | {(c.phase, c.step) for c in _trusted(ctx)}


def stage_checkpoint(ctx: TrainContext, phase: str, step: int, *, must: bool) -> None:
    """Stage the present state as ``phase``/``step``; ``must`` waits until it is committed.

    The manifest says how things stood at that step, also when the step is being redone and the log
    goes on far beyond it.

    Raises:
        StorageError, DamagedError: ``must`` and it could not be committed.
    """
    state = ctx.store.state
    position = _position(ctx, phase, step)
    submitted = _submitted_before(ctx, position)
    info = StagedInfo(
        position=position,
        clocks={
            "global_step": ctx.progress.global_step,
            "local_update": ctx.progress.local_updates,
            "optimizer_step": ctx.runtime.optimizer_step,
            "policy_version": _version_before(ctx, position),
        },
        lineage={
            "run_id": ctx.run.run_id,
            "incarnation": ctx.store.incarnation,
            "parent": state.incarnations[-1].parent,
            **log_end(ctx.store.position),
        },
        algorithm=ctx.config.learner.algorithm,
        config_digest=ctx.config_digest,
        dataset_digest=ctx.task.dataset_digest,
        # Groups and prompts are counted alike: every submission is a new group with a new prompt.
        experience={"next_group": submitted, "next_data_index": submitted},
        keep=ctx.checkpoints.options.rules,
        environment={"threads": ctx.config.threads, **ctx.run.versions},
    )
    name = CheckpointName(phase, step, ctx.store.incarnation)
    if ctx.checkpoints.stage(name, info=info, must=must):
        ctx.staged.add((phase, step))
        ctx.last_checkpoint_s = ctx.clock.monotonic_s()


def _version_before(ctx: TrainContext, position: LogPosition) -> PolicyVersion:
    """The version that engines held when the log ended at ``position``; 0 before the first."""
    published = reversed(ctx.store.state.published.values())
    return next((r.version for r in published if _lies_before(ctx, r, position)), PolicyVersion(0))


def _submitted_before(ctx: TrainContext, position: LogPosition) -> int:
    """How many groups were submitted when the log ended at ``position``.

    Groups are taken oldest first, so the last batch has the newest of those that are retired.
    """
    state = ctx.store.state
    batches = (r for r in reversed(state.taken.values()) if _lies_before(ctx, r, position))
    last = next(batches, None)
    known = [*last.groups] if last is not None else []
    known += [n for n, g in state.groups.items() if _lies_before(ctx, g.submitted, position)]
    return max(known, default=-1) + 1


def _lies_before(ctx: TrainContext, record: ControlRecord, position: LogPosition) -> bool:
    place = ctx.store.state.position_of(record)
    return place is not None and place <= position


def _position(ctx: TrainContext, phase: str, step: int) -> LogPosition:
    """End of the last record that the staged state stands behind: redo starts there.

    Not the end of the log, which goes on far beyond when the step itself is being redone.
    """
    state = ctx.store.state
    behind: ControlRecord = state.incarnations[0]
    for record in state.phase_steps.values():
        if phase == "train" or record.step <= step:
            behind = record
    if phase == "train" and step > 0:
        behind = state.step_done[GlobalStep(step)]
    position = state.position_of(behind)
    assert position is not None, f"{behind.key()} is awaited before its state is staged"
    return position


def _trusted(ctx: TrainContext) -> list[Checkpointed]:
    return [c for c in ctx.store.committed() if c.directory not in ctx.distrusted]
