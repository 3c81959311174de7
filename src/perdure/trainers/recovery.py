"""One incarnation of a run, from the claim to the close: the order of recovery (spec H2).

Claim (fences) → verify and choose → restore model, optimizer, schedule, counters, generators →
sanity check → announce the incarnation in the log → warm start → redo → publish → mode loop.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from perdure.checkpoint import Checkpointer, Choice
from perdure.checkpoint.manifest import CHECKPOINTS
from perdure.checkpoint.tier import ObjectStore
from perdure.checkpoint.verification import QUARANTINE
from perdure.config import config_digest
from perdure.core.clock import Clock
from perdure.core.errors import DamagedError
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.core.ids import GlobalStep
from perdure.core.inline_executor import InlineExecutor
from perdure.core.storage_api import Storage
from perdure.experience import ClaimedRun, ExperienceStore, LogOptions, claim_experience
from perdure.experience.claims import INCARNATION_DIR
from perdure.experience.seals import SEAL_DIR
from perdure.runtime.ledger import LogLedger
from perdure.runtime.log_reach import check_log_reaches_checkpoints
from perdure.runtime.metrics_files import METRICS_DIR
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.remote import Remote
from perdure.runtime.views import Views, ViewsFactory, file_views
from perdure.tasks.api import Task
from perdure.trainers.assembly import (
    Machinery,
    MachineryFactory,
    build_machinery,
    register_components,
)
from perdure.trainers.config import RunConfig
from perdure.trainers.context import TrainContext
from perdure.trainers.leftovers import drop_abandoned, set_poison_aside
from perdure.trainers.live_facts import telling
from perdure.trainers.memory import warn_of_memory
from perdure.trainers.mismatch_watch import MismatchWatch
from perdure.trainers.pretrained import load_initial_weights
from perdure.trainers.progress import Progress
from perdure.trainers.redo import redo
from perdure.trainers.sanity import check_curve, check_restored
from perdure.trainers.saving import checkpoint_options, save_at_stop, stage_checkpoint_if_due
from perdure.trainers.shipping import remote_of
from perdure.trainers.signal_watch import SignalWatch
from perdure.trainers.steps import complete_step
from perdure.trainers.stopping import StopRequest
from perdure.trainers.validation import held_out_prompts
from perdure.trainers.warm_start import warm_start

ATOMIC_WRITES_GO_TO = ("", INCARNATION_DIR, SEAL_DIR, CHECKPOINTS, QUARANTINE, METRICS_DIR)
"""Directories of a run where a killed process may have left a temporary file."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What an incarnation is started with.

    Attributes:
        take_over: Fence off a live process that holds the run.
        redo: Train the batches logged after the checkpoint again; without it they are void.
        stop: Asks it to end before the training is over.
        machinery: Builds learner and engines.
        objects: Remote tier in place of the one that the recipe names.
        views: Opens what people see.
        threads: Log and checkpoints are written by threads of their own; False: by the caller's.
    """

    run_dir: Path
    config: RunConfig
    task: Task
    storage: Storage
    clock: Clock
    faults: FaultHook
    events: EventSink
    take_over: bool = False
    redo: bool = True
    stop: StopRequest = field(default_factory=StopRequest)
    machinery: MachineryFactory = build_machinery
    objects: ObjectStore | None = None
    views: ViewsFactory = file_views
    threads: bool = True


@asynccontextmanager
async def incarnation(launch: Launch) -> AsyncIterator[TrainContext]:
    """Bring a run to its frontier, hand it to a mode loop, and close everything afterwards.

    Raises:
        RunBusyError: A live process holds the run.
        DamagedError: Durable bytes are wrong and nothing valid is left to go on from.
        RedoDivergedError: Deterministic mode and a redone step differs from its record.
    """
    async with AsyncExitStack() as stack:
        opened = stack.enter_context(launch.views(launch.run_dir, launch.storage, launch.clock))

        def events(name: str, fields: dict[str, object]) -> None:
            opened.events(name, fields)
            launch.events(name, fields)

        views = replace(opened, events=events)

        warn_of_memory(launch.config, launch.task, events)
        check_log_reaches_checkpoints(launch.storage)
        claimed = claim_experience(
            launch.storage,
            clock=launch.clock,
            faults=launch.faults,
            events=events,
            take_over=launch.take_over,
            options=LogOptions(**launch.config.log.model_dump(), threaded=launch.threads),
        )
        stack.callback(claimed.release)
        stack.push(partial(_tell_end, launch, events))
        remote = remote_of(
            launch.config.checkpoint,
            clock=launch.clock,
            faults=launch.faults,
            events=events,
            objects=launch.objects,
        )
        if remote is not None:
            # After the log is closed: it ships the end of it as well.
            stack.callback(remote.close)
        machinery = launch.machinery(launch.config, launch.task)
        stack.push_async_callback(machinery.close)
        ctx = _open(launch, claimed, machinery=machinery, views=views, stack=stack, remote=remote)
        _announce_start(ctx, launch)
        await stack.enter_async_context(ctx.runtime.serving())
        try:
            with telling(ctx, opened.live):
                await _advance(ctx)
                yield ctx
        except CancelledError:
            if launch.stop.signum is not None and not launch.stop.at_once:
                save_at_stop(ctx)
            raise
        launch.stop.complete = True
        _finish(ctx, launch)


def _tell_end(
    launch: Launch,
    events: EventSink,
    kind: type[BaseException] | None,
    error: BaseException | None,
    *rest: object,
) -> None:
    """Say why an incarnation ends before the training does: its output may have no reader."""
    del rest
    if kind is None or launch.stop.complete:
        return
    stopped = launch.stop.signum is not None and issubclass(
        kind, CancelledError | KeyboardInterrupt
    )
    reason = launch.stop.error(launch.run_dir).what if stopped else f"{kind.__name__}: {error}"
    events("run_ended", {"reason": reason})


def _open(
    launch: Launch,
    claimed: ClaimedRun,
    *,
    machinery: Machinery,
    views: Views,
    stack: AsyncExitStack,
    remote: Remote | None,
) -> TrainContext:
    """Restore, announce the incarnation in the log, and put the context together."""
    progress, events = Progress(), views.events
    ledger = LogLedger(claimed.state)
    checkpoints = Checkpointer(
        launch.storage,
        registry=register_components(machinery, progress),
        ledger=ledger,
        clock=launch.clock,
        faults=launch.faults,
        events=events,
        options=checkpoint_options(launch.config.checkpoint),
        executor=None if launch.threads else InlineExecutor(),
    )
    choice = _restore(launch, claimed, checkpoints, weights=machinery.learner.policy_weights())
    if choice is not None and not launch.redo:
        _announce_rewind(claimed, choice, progress=progress, events=events)
    check_restored(
        progress, last_step=claimed.state.last_step, weights=machinery.learner.policy_weights()
    )
    check_curve(claimed.state, views.last_step_shown, events=events)
    digest = config_digest(launch.config)
    store = _start(launch, claimed, choice=choice, progress=progress, digest=digest)

    def close_store(kind: type[BaseException] | None, *rest: object) -> None:
        del rest
        store.close("finished" if kind is None else f"ended by {kind.__name__}")

    stack.push(close_store)
    ledger.start(store)
    stack.callback(checkpoints.close)
    if remote is not None:
        incarnation = claimed.incarnation
        checkpoints.ship_to(remote.start(launch.storage, ledger=ledger, incarnation=incarnation))
    checkpoints.sweep(store.state.collected)
    for path in ATOMIC_WRITES_GO_TO:
        launch.storage.collect_temporaries(path)
    views.metrics.rebuild(steps=store.state.curve(), evaluations=store.state.evaluated.values())
    parts = RuntimeParts(store, launch.task, launch.clock, launch.faults, events)
    return TrainContext(
        config=launch.config,
        config_digest=digest,
        run=claimed.run,
        task=launch.task,
        store=store,
        runtime=machinery.runtime(parts),
        checkpoints=checkpoints,
        metrics=views.metrics,
        curve=views.curve,
        clock=launch.clock,
        faults=launch.faults,
        events=events,
        stop=launch.stop,
        signal=SignalWatch(launch.config),
        mismatch=MismatchWatch(launch.config.learner.mismatch_alarm),
        progress=progress,
        held_out=held_out_prompts(launch.config, launch.task),
        distrusted=frozenset(d for d, _ in choice.skipped) if choice else frozenset(),
        rows_upto=store.state.last_step,
        last_checkpoint_s=launch.clock.monotonic_s(),
    )


def _restore(
    launch: Launch, claimed: ClaimedRun, checkpoints: Checkpointer, *, weights: Mapping[str, Any]
) -> Choice | None:
    """Load the newest whole checkpoint of the kept lineage.

    A run that has none yet begins with the weights that its recipe names, and None is returned.
    """
    committed = claimed.state.checkpoints
    if not committed:
        if claimed.state.taken:
            raise DamagedError(
                f"{len(claimed.state.taken)} batches were trained and no checkpoint is committed",
                where="log",
                rule="checkpoint 0 is durable before the first batch is taken",
                way_out="put the run directory back from a copy",
            )
        load_initial_weights(launch.config, weights)
        return None
    choice = checkpoints.choose(committed)
    checkpoints.restore(choice)
    return choice


def _start(
    launch: Launch,
    claimed: ClaimedRun,
    *,
    choice: Choice | None,
    progress: Progress,
    digest: str,
) -> ExperienceStore:
    """Announce the incarnation: which checkpoint it stands on and how far it will redo."""
    beyond = [update for update in claimed.state.taken if update.global_step > progress.global_step]
    rewind_to = choice.manifest.info.position if choice and not launch.redo else None
    return claimed.start(
        base_checkpoint=choice.directory if choice else "",
        base_position=rewind_to,
        redo_until=max(beyond) if beyond and rewind_to is None else None,
        config_digest=digest,
    )


def _announce_rewind(
    claimed: ClaimedRun, choice: Choice, *, progress: Progress, events: EventSink
) -> None:
    """Say which steps are void from here on, and how many groups they had taken."""
    step = progress.global_step
    void = {u: taken for u, taken in claimed.state.taken.items() if u.global_step > step}
    fields: dict[str, object] = {
        "name": choice.directory,
        "step": step,
        "void_to_step": max((update.global_step for update in void), default=step),
        "groups": sum(len(taken.groups) for taken in void.values()),
    }
    events("rewound", fields)


async def _advance(ctx: TrainContext) -> None:
    """From the restored state to the frontier: warm start, redo, and the end of the last step."""
    await set_poison_aside(ctx)
    await warm_start(ctx)
    if ctx.progress.global_step == 0:
        stage_checkpoint_if_due(ctx, GlobalStep(0))

    async def complete() -> None:
        await drop_abandoned(ctx)
        await complete_step(ctx, GlobalStep(ctx.progress.global_step))

    await redo(ctx, at_frontier=complete)


def _announce_start(ctx: TrainContext, launch: Launch) -> None:
    fields: dict[str, object] = {
        "run": str(launch.run_dir),
        "incarnation": ctx.store.incarnation,
        "task": launch.config.task.name,
        "total_steps": launch.config.trainer.total_steps,
        "warm_start_steps": launch.config.learner.supervised.steps,
    }
    ctx.events("run_started", fields)


def _finish(ctx: TrainContext, launch: Launch) -> None:
    """The run is complete: wait for the last checkpoint and say how it ended."""
    ctx.checkpoints.close()
    step = ctx.progress.global_step
    fields: dict[str, object] = {
        "run": str(launch.run_dir),
        "incarnation": ctx.store.incarnation,
        "global_step": step,
        "digest": ctx.store.state.step_done[GlobalStep(step)].digest,
    }
    ctx.events("run_finished", fields)
