"""The run directory of a script, with the files of a trainer: claimed, restored, let go."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.checkpoint import Checkpointer, CheckpointOptions, Choice, Registry, StagedInfo
from perdure.checkpoint.manifest import CHECKPOINTS
from perdure.checkpoint.snapshot import library_versions
from perdure.checkpoint.verification import QUARANTINE
from perdure.core.errors import ConfigError, DamagedError, NothingToResumeError, PerdureError
from perdure.core.ids import CheckpointName
from perdure.experience import ClaimedRun, ExperienceStore, RunInfo, claim_experience, create_run
from perdure.experience.claims import INCARNATION_DIR, read_run
from perdure.experience.seals import SEAL_DIR
from perdure.runtime.ledger import LogLedger
from perdure.runtime.log_reach import check_log_reaches_checkpoints
from perdure.standalone.joined import join_run, told
from perdure.standalone.parts import Progress
from perdure.standalone.world import (
    OpenRun,
    Restoring,
    World,
    checkpointer,
    require_storable,
    restore_chosen,
)

ATOMIC_WRITES_GO_TO = ("", INCARNATION_DIR, SEAL_DIR, CHECKPOINTS, QUARANTINE)
"""Directories where a killed process may have left a temporary file."""


class ClaimedByUs:
    """A run that this process has claimed and writes."""

    def __init__(self, world: World, held: Held, store: ExperienceStore) -> None:
        self.saver = held.saver
        self._world = world
        self._claimed = held.claimed
        self._store = store

    def stage(self, progress: Progress, *, metrics: Mapping[str, float], must: bool) -> bool:
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
        self.saver.store_segments(self._claimed.incarnation)

    def close(self, reason: str, *, deadline_s: float | None = None) -> None:
        with contextlib.ExitStack() as stack:
            if self._world.remote is not None:
                # Last: it ships the end of the log as well.
                stack.callback(self._world.remote.close, deadline_s)
            stack.callback(self._store.close, reason)
            self.saver.close(deadline_s)

    def abandon(self, reason: str, *, deadline_s: float | None = None) -> None:
        close = functools.partial(self.close, deadline_s=deadline_s)
        for end in (self._world.team.leave, close):
            try:
                end(reason)
            except PerdureError as error:
                self._world.events("warning", {"message": f"while the run was closed: {error}"})


@dataclass(frozen=True, slots=True)
class Held:
    """What has been claimed, and the checkpoint to go on from."""

    claimed: ClaimedRun
    ledger: LogLedger
    saver: Checkpointer
    choice: Choice | None


def open_run(
    world: World,
    *,
    registry: Registry,
    options: CheckpointOptions,
    how: Restoring,
    restored: Callable[[Choice | None], None],
) -> OpenRun:
    """Create the run if there is none, claim it, and restore the newest whole checkpoint.

    Of several ranks the first one claims and chooses; all of them restore what it has chosen.

    Args:
        world: Where it lies, and who takes part.
        registry: Every part of the script.
        options: Bounds of the saves.
        how: Whom to fence, and what starts empty.
        restored: Called after the parts were loaded and before anything is written.

    Raises:
        RunBusyError: A live process holds the run.
        DamagedError: Something was committed and nothing of it can be used.
        ConfigError: Stored and registered parts differ, ranks differ in what they should share, or
            this is a run of ``perdure train``.
        TrainingError: Another rank has said nothing in time.
    """
    team = world.team
    team.together(lambda: require_storable(registry))
    if not team.place.leads:
        return join_run(world, registry=registry, options=options, how=how, restored=restored)
    taken: list[Held] = []

    def claim() -> dict[str, Any]:
        taken.append(_claim(world, registry=registry, options=options, how=how))
        return told(taken[0].claimed, taken[0].choice)

    try:
        team.tell(claim)
        (held,) = taken
        team.together(lambda: restore_chosen(held.saver, held.choice, how, restored))
    except BaseException:
        for held in taken:
            held.claimed.release()
        raise
    runs: list[ClaimedByUs] = []
    try:
        team.tell(lambda: runs.append(_start(world, held)))
        team.together(held.saver.reserve)
        held.saver.require_agreement()
    except BaseException:
        for run in runs:
            run.abandon("not started")
        raise
    return runs[0]


def _claim(world: World, *, registry: Registry, options: CheckpointOptions, how: Restoring) -> Held:
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
        saver = checkpointer(world, registry=registry, options=options, ledger=ledger)
        choice = None
        if claimed.state.checkpoints:
            segments = "nothing" if how.cold else "index"
            choice = saver.choose(claimed.state.checkpoints, segments=segments)
    except BaseException:
        claimed.release()
        raise
    return Held(claimed, ledger, saver, choice)


def _start(world: World, held: Held) -> ClaimedByUs:
    """Begin to write."""
    try:
        store = held.claimed.start(base_checkpoint=held.choice.directory if held.choice else "")
    except BaseException:
        held.claimed.release()
        raise
    run = ClaimedByUs(world, held, store)
    held.ledger.start(store)
    try:
        if world.remote is not None:
            incarnation = held.claimed.incarnation
            tier = world.remote.start(world.storage, ledger=held.ledger, incarnation=incarnation)
            held.saver.ship_to(tier)
        held.saver.sweep(store.state.collected)
        for path in ATOMIC_WRITES_GO_TO:
            world.storage.collect_temporaries(path)
    except BaseException:
        run.abandon("not started")
        raise
    return run


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
    if world.remote is not None:
        world.remote.require_own(info.run_id)
    if info.config_digest:
        raise ConfigError(
            "is a run of `perdure train`",
            where=str(world.run_dir),
            rule="a script keeps its checkpoints in a run of its own",
            way_out="name another directory",
        )
