"""The run directory of a script, with the files of a trainer: claimed, restored, let go."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgpack

from perdure.checkpoint import Checkpointer, CheckpointOptions, Choice, Registry, StagedInfo
from perdure.checkpoint.arena import spec_of
from perdure.checkpoint.manifest import CHECKPOINTS
from perdure.checkpoint.snapshot import library_versions
from perdure.checkpoint.verification import QUARANTINE
from perdure.core.clock import Clock
from perdure.core.errors import ConfigError, DamagedError, NothingToResumeError, PerdureError
from perdure.core.events import EventSink, format_event
from perdure.core.faults import FaultHook
from perdure.core.ids import CheckpointName
from perdure.core.storage_api import Storage
from perdure.experience import ClaimedRun, ExperienceStore, RunInfo, claim_experience, create_run
from perdure.experience.claims import INCARNATION_DIR, read_run
from perdure.experience.seals import SEAL_DIR
from perdure.runtime.ledger import LogLedger
from perdure.runtime.log_reach import check_log_reaches_checkpoints
from perdure.runtime.remote import Remote
from perdure.standalone.parts import Progress

ATOMIC_WRITES_GO_TO = ("", INCARNATION_DIR, SEAL_DIR, CHECKPOINTS, QUARANTINE)
"""Directories where a killed process may have left a temporary file."""

_log = logging.getLogger("perdure")
_LOUD = frozenset(
    (
        "warning",
        "checkpoint_damaged",
        "checkpoint_failed",
        "checkpoint_skipped",
        "checkpoint_writer_lost",
        "segment_damaged",
        "remote_failed",
        "remote_fenced",
    )
)


def log_event(name: str, fields: dict[str, object]) -> None:
    """The default sink: a line to the logger ``perdure``, a warning where something went wrong."""
    level = logging.WARNING if name in _LOUD else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, format_event(name, fields))


@dataclass(frozen=True, slots=True)
class World:
    """Where a run lives and what its time, faults and reports are."""

    run_dir: Path
    storage: Storage
    clock: Clock
    faults: FaultHook
    events: EventSink
    remote: Remote | None = None


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """What a script goes on from.

    Attributes:
        name: Directory below ``checkpoints/``.
        step: Completed steps.
        skipped: Newer checkpoints that could not be used, with the reason, newest first.
        mismatches: Values kept in two places that did not agree.
    """

    name: str
    step: int
    skipped: tuple[tuple[str, str], ...] = ()
    mismatches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restoring:
    """How a run is opened.

    Attributes:
        take_over: Fence a live process that holds it.
        cold: Parts stored as segments that start without their rows.
        allow_legacy: Whether pickles may be opened.
    """

    take_over: bool = False
    cold: tuple[str, ...] = ()
    allow_legacy: bool = False


class OpenRun:
    """A claimed run that this process writes. Made by :func:`open_run`."""

    def __init__(
        self, world: World, *, claimed: ClaimedRun, store: ExperienceStore, saver: Checkpointer
    ) -> None:
        self.saver = saver
        self._world = world
        self._claimed = claimed
        self._store = store

    def stage(self, progress: Progress, *, metrics: Mapping[str, float], must: bool) -> bool:
        """Save the present state as that of ``progress.step``; False if no arena was free.

        ``metrics`` say how good the state is.

        Raises:
            ConfigError: A state cannot be stored, or the step was saved before.
            StorageError: ``must`` and it could not be committed.
        """
        info = StagedInfo(
            position=self._store.position,
            clocks={"global_step": progress.step},
            lineage={
                "run_id": self._claimed.run.run_id,
                "incarnation": self._claimed.incarnation,
                "parent": self._claimed.parent,
            },
            algorithm="",
            config_digest="",
            dataset_digest="",
            metrics=dict(metrics),
            keep=self.saver.options.rules,
        )
        name = CheckpointName("loop", progress.step, self._claimed.incarnation)
        return self.saver.stage(name, info=info, must=must)

    def store_segments(self) -> None:
        """Store what is there of whole segments, if the saver has nothing else to do."""
        self.saver.store_segments(self._claimed.incarnation)

    def close(self, reason: str) -> None:
        """Wait for pending saves, end the log and let the run go.

        Raises:
            PerdureError: Something could not be made durable. The run is let go all the same.
        """
        with contextlib.ExitStack() as stack:
            if self._world.remote is not None:
                # Last: it ships the end of the log as well.
                stack.callback(self._world.remote.close)
            stack.callback(self._store.close, reason)
            self.saver.close()

    def abandon(self, reason: str) -> None:
        """As :meth:`close`, while another error is on its way: failures are reported only."""
        try:
            self.close(reason)
        except PerdureError as error:
            self._world.events("warning", {"message": f"while the run was closed: {error}"})


def open_run(
    world: World,
    *,
    registry: Registry,
    options: CheckpointOptions,
    how: Restoring,
    restored: Callable[[Choice | None], None],
) -> OpenRun:
    """Create the run if there is none, claim it, and restore the newest whole checkpoint.

    Args:
        registry: Every part of the script.
        options: Bounds of the saves.
        how: Whom to fence, and what starts empty.
        restored: Called after the parts were loaded and before anything is written.

    Raises:
        RunBusyError: A live process holds the run.
        DamagedError: Something was committed and nothing of it can be used.
        ConfigError: Stored and registered parts differ, or this is a run of ``perdure train``.
    """
    _require_storable(registry)
    if world.remote is not None:
        world.remote.fetch_if_absent(world.storage)
    _create_if_absent(world)
    check_log_reaches_checkpoints(world.storage)
    claimed = claim_experience(
        world.storage,
        clock=world.clock,
        faults=world.faults,
        events=world.events,
        take_over=how.take_over,
    )
    try:
        ledger = LogLedger(claimed.state)
        saver = Checkpointer(
            world.storage,
            registry=registry,
            ledger=ledger,
            clock=world.clock,
            faults=world.faults,
            events=world.events,
            options=options,
        )
        choice = _restore(claimed, saver, how)
        restored(choice)
        store = claimed.start(base_checkpoint=choice.directory if choice else "")
    except BaseException:
        claimed.release()
        raise
    run = OpenRun(world, claimed=claimed, store=store, saver=saver)
    ledger.start(store)
    try:
        if world.remote is not None:
            tier = world.remote.start(world.storage, ledger=ledger, incarnation=claimed.incarnation)
            saver.ship_to(tier)
        saver.reserve()
        saver.sweep(store.state.collected)
        for path in ATOMIC_WRITES_GO_TO:
            world.storage.collect_temporaries(path)
    except BaseException:
        run.abandon("not started")
        raise
    return run


def _require_storable(registry: Registry) -> None:
    """Learn before the first step, not at the first save, that something cannot be stored."""
    for entry in registry.entries():
        state = entry.component.state()
        try:
            msgpack.packb(dict(state.values))
            for tensor in state.tensors.values():
                spec_of(tensor)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"cannot be saved: {error}",
                where=f"component {entry.name}",
                rule="a checkpoint stores dense tensors of plain number types and small values",
                way_out="convert it before it is registered",
            ) from error


def _restore(claimed: ClaimedRun, saver: Checkpointer, how: Restoring) -> Choice | None:
    if not claimed.state.checkpoints:
        return None
    segments = "nothing" if how.cold else "index"
    choice = saver.choose(claimed.state.checkpoints, segments=segments)
    saver.restore(choice, cold=how.cold, allow_legacy=how.allow_legacy)
    return choice


def _create_if_absent(world: World) -> None:
    storage = world.storage
    storage.make_dirs("")
    try:
        info = read_run(storage)
    except NothingToResumeError:
        remains = [name for name in (CHECKPOINTS, QUARANTINE) if storage.list(name)]
        if remains:
            raise DamagedError(
                f"run.json is missing, and the directory holds {', '.join(remains)}",
                where=str(world.run_dir),
                rule="nothing is started over what may be a run",
                way_out="restore the file from a copy, or name another directory",
            ) from None
        fresh = RunInfo(uuid.uuid4().hex, world.clock.wall_s(), library_versions())
        info = create_run(storage, fresh)
    if info.config_digest:
        raise ConfigError(
            "is a run of `perdure train`",
            where=str(world.run_dir),
            rule="a script keeps its checkpoints in a run of its own",
            way_out="name another directory",
        )
