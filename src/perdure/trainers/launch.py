"""Starting and resuming runs: from a configuration or a run directory to a finished training."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.checkpoint.manifest import CHECKPOINTS
from perdure.checkpoint.tier import ObjectStore
from perdure.checkpoint.verification import QUARANTINE
from perdure.config import config_digest, render_yaml
from perdure.core.clock import Clock, SystemClock
from perdure.core.errors import (
    ConfigError,
    DamagedError,
    RunBusyError,
    StorageError,
)
from perdure.core.events import EventSink, ignore_events
from perdure.core.faults import FaultHook, NoFaults
from perdure.core.storage_api import Storage
from perdure.experience import RunInfo, create_run, read_run
from perdure.experience.claims import INCARNATION_DIR, RUN_FILE, is_held
from perdure.experience.seals import SEAL_DIR
from perdure.experience.segments import LOG_DIR
from perdure.storage import PosixStorage
from perdure.storage.refusals import before_the_run
from perdure.tasks.api import Task, require_same_data
from perdure.tasks.config import make_task
from perdure.trainers import colocate_async, separate_async, sync
from perdure.trainers.config import RunConfig
from perdure.trainers.context import TrainContext
from perdure.trainers.engine_actors import cluster_of
from perdure.trainers.environment import fix_arithmetic, machine_description
from perdure.trainers.memory import require_memory
from perdure.trainers.pretrained import require_pretrained_fits
from perdure.trainers.recorded_config import CONFIG_FILE, recorded_config
from perdure.trainers.recovery import Launch, incarnation
from perdure.trainers.shipping import fetch_if_absent, remote_of
from perdure.trainers.validation import held_out_prompts

LOG_PARTS = (INCARNATION_DIR, SEAL_DIR, LOG_DIR)
"""Directories that are empty until an incarnation has claimed the run."""
CREATE_LOCK = "create.lock"
_HALF_CREATED = (*LOG_PARTS, CHECKPOINTS, QUARANTINE, CONFIG_FILE, CREATE_LOCK, "lost+found")
"""What a directory may hold before there is a run in it, judged by what lies below."""
MODES: dict[str, Callable[[TrainContext], Awaitable[None]]] = {
    "sync": sync.run,
    "colocate_async": colocate_async.run,
    "separate_async": separate_async.run,
}
"""Trainer mode → its loop."""


@dataclass(frozen=True, slots=True)
class Injected:
    """Time, faults and storage of a run; tests and drills put in their own.

    Attributes:
        storage: None means the real disk below the run directory.
        objects: None means those at ``checkpoint.remote``.
    """

    clock: Clock = field(default_factory=SystemClock)
    faults: FaultHook = field(default_factory=NoFaults)
    storage: Storage | None = None
    objects: ObjectStore | None = None

    def storage_of(self, run_dir: Path) -> Storage:
        return self.storage or PosixStorage(run_dir, faults=self.faults)


def train(
    config: RunConfig,
    run_dir: Path,
    *,
    display: EventSink = ignore_events,
    injected: Injected | None = None,
) -> None:
    """Create a run in ``run_dir`` and train it to the end.

    Raises:
        ConfigError: There is a run or something else already, or the configuration does not fit
            the task or the cluster.
        DamagedError: There is what a run leaves, without its ``run.json``.
        RunBusyError: Another process is creating the run at this moment, or holds it.
        StorageError: The directory cannot be written.
        StoppedError: SIGTERM or Ctrl-C came; ``resume`` goes on.
    """
    injected = injected or Injected()
    with cluster_of(config, clock=injected.clock, events=display):
        task = create(config, run_dir, injected=injected)
        storage = injected.storage_of(run_dir)
        _execute(
            Launch(
                run_dir,
                config,
                task,
                storage,
                injected.clock,
                injected.faults,
                display,
                objects=injected.objects,
            )
        )


def resume(
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    take_over: bool = False,
    redo: bool = True,
    display: EventSink = ignore_events,
    injected: Injected | None = None,
) -> None:
    """Go on with the run in ``run_dir`` as if nothing had happened.

    Args:
        overrides: ``key=value`` in place of recorded settings, for this incarnation; only those
            that do not change what was trained (:func:`recorded_config`). If there is no run,
            it is brought back from the remote tier that ``checkpoint.remote`` among them names.

    Raises:
        NothingToResumeError: There is no run.
        ConfigError: The data were changed, an override is refused, the cluster does not fit, or
            the remote tier holds another run.
        RunBusyError: A live process holds the run and ``take_over`` is not set.
        DamagedError: Durable bytes are wrong and there is nothing valid to go on from, or
            ``config.yaml`` is not the one the run was started with.
        RedoDivergedError: Deterministic mode and a redone step differs from its record.
        StoppedError: SIGTERM or Ctrl-C came; ``resume`` goes on.
    """
    injected = injected or Injected()
    storage = injected.storage_of(run_dir)
    clock, faults, objects = injected.clock, injected.faults, injected.objects
    fetch_if_absent(storage, overrides, clock=clock, faults=faults, objects=objects)
    info = read_run(storage)
    config = recorded_config(storage, run_dir, info=info, overrides=overrides)
    remote = remote_of(config.checkpoint, clock=clock, faults=faults, objects=objects)
    if remote is not None:
        remote.require_own(info.run_id)
    task = make_task(config.task, config.seed)
    require_same_data(task, info.dataset_digest)
    require_memory(config, task)
    config.agent.build()
    with cluster_of(config, clock=clock, events=display):
        _execute(
            Launch(
                run_dir,
                config,
                task,
                storage,
                clock,
                faults,
                display,
                take_over,
                redo,
                objects=objects,
            )
        )


def _execute(launch: Launch) -> None:
    fix_arithmetic(launch.config)
    try:
        with launch.stop.listening():
            asyncio.run(_until_stopped(launch))
    except (asyncio.CancelledError, KeyboardInterrupt):
        if launch.stop.signum is None:
            raise
        if not launch.stop.complete:
            raise launch.stop.error(launch.run_dir) from None


async def _until_stopped(launch: Launch) -> None:
    """One incarnation. A stop cancels it where nothing is half done, and closes the log."""
    launch.stop.attach()
    async with incarnation(launch) as ctx:
        await MODES[launch.config.mode](ctx)


def create(config: RunConfig, run_dir: Path, *, injected: Injected) -> Task:
    """Make the run directory without training; returns the task. Raises as :func:`train`."""
    task = make_task(config.task, config.seed)
    _check_fit(config, task)
    info = RunInfo(
        run_id=uuid.uuid4().hex,
        created_wall_s=injected.clock.wall_s(),
        versions=machine_description(),
        config_digest=config_digest(config),
        dataset_digest=task.dataset_digest,
    )
    storage = injected.storage_of(run_dir)
    remote = remote_of(
        config.checkpoint,
        clock=injected.clock,
        faults=injected.faults,
        objects=injected.objects,
    )
    if remote is not None and not storage.exists(RUN_FILE):
        remote.require_empty()
    try:
        _create(storage, run_dir, config=config, info=info)
    except StorageError as error:
        if storage.exists(RUN_FILE):
            raise
        raise before_the_run(error) from error
    return task


def _create(storage: Storage, run_dir: Path, *, config: RunConfig, info: RunInfo) -> None:
    """``run.json`` commits the creation; whatever one that was cut short left is made again."""
    if not storage.exists(RUN_FILE):
        _refuse_filled(storage, run_dir)
    storage.make_dirs("")
    lock = storage.lock(CREATE_LOCK)
    if lock is None:
        raise RunBusyError(
            "another process is creating a run here",
            where=str(run_dir),
            way_out="choose another directory with --run DIR",
        )
    try:
        _refuse_run(storage, run_dir)
        storage.write_atomic(CONFIG_FILE, render_yaml(config).encode())
        create_run(storage, info)
    finally:
        lock.release()


def _refuse_filled(storage: Storage, run_dir: Path) -> None:
    """A run is not mixed with other things or another's remains; nothing has been written yet."""
    remains = [name for name in (*LOG_PARTS, CHECKPOINTS, QUARANTINE) if storage.list(name)]
    if remains:
        raise DamagedError(
            f"is missing, and the directory holds {', '.join(remains)}",
            where=str(run_dir / RUN_FILE),
            rule="nothing is started over what may be the experience of a run",
            way_out="restore the file from a copy and resume, or choose another --run DIR",
        )
    others = [name for name in storage.list("") if name not in _HALF_CREATED]
    if others:
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise ConfigError(
            f"the directory is not empty (it holds {shown})",
            where=str(run_dir),
            rule="a run has a directory of its own",
            way_out="choose a new or empty directory with --run DIR",
        )


def _refuse_run(storage: Storage, run_dir: Path) -> None:
    if storage.exists(RUN_FILE):
        if is_held(storage):
            raise RunBusyError(
                "a live process trains a run here",
                where=str(run_dir),
                rule="a run is never started over an existing one",
                way_out="choose another --run DIR",
            )
        raise ConfigError(
            "there is a run here already",
            where=str(run_dir),
            rule="a run is never started over an existing one",
            way_out=f"go on with `perdure resume {run_dir}`, or choose another --run DIR",
        )


def _check_fit(config: RunConfig, task: Task) -> None:
    """Rules that need the task's data: answers fit, enough held-out prompts, enough memory.

    Tools of the user's own are imported here, before there is a run.
    """
    config.agent.build()
    require_memory(config, task)
    require_pretrained_fits(config, task)
    if config.rollout.max_new_tokens < task.max_answer_tokens:
        raise ConfigError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}",
            where=f"task {task.name}",
            rule=f"right answers need up to {task.max_answer_tokens} tokens",
            way_out=f"set rollout.max_new_tokens={task.max_answer_tokens}",
        )
    held_out_prompts(config, task)
