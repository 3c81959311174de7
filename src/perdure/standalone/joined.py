"""A run that the first rank of a job has claimed, as its other ranks take part in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perdure.checkpoint import (
    Checkpointer,
    CheckpointOptions,
    Choice,
    MemoryLedger,
    Registry,
    StagedInfo,
    committed_manifest,
)
from perdure.core.errors import ConfigError, NothingToResumeError, PerdureError
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage
from perdure.experience import ClaimedRun
from perdure.experience.claims import read_run
from perdure.standalone.parts import Progress
from perdure.standalone.world import OpenRun, Restoring, World, checkpointer, restore_chosen


def told(claimed: ClaimedRun, choice: Choice | None) -> dict[str, Any]:
    """What the first rank tells the others of the run it has claimed."""
    message: dict[str, Any] = {
        "run_id": claimed.run.run_id,
        "incarnation": claimed.incarnation,
        "choice": None,
    }
    if choice is not None:
        digests = {record.directory: record.manifest_digest for record in claimed.state.checkpoints}
        message["choice"] = {
            "phase": choice.name.phase,
            "step": choice.name.step,
            "incarnation": choice.name.incarnation,
            "manifest_digest": digests[choice.directory],
            "skipped": [list(pair) for pair in choice.skipped],
        }
    return message


class JoinedRun:
    """This rank's side of a run: it stores its share and commits nothing."""

    def __init__(self, world: World, saver: Checkpointer, incarnation: IncarnationNumber) -> None:
        self.saver = saver
        self._world = world
        self._incarnation = incarnation

    def stage(self, progress: Progress, *, metrics: Mapping[str, float], must: bool) -> bool:
        del metrics
        # Only what the first rank knows of the run gets into the manifest.
        info = StagedInfo(
            position=LogPosition(self._incarnation, 0, 0),
            clocks={},
            lineage={},
            algorithm="",
            config_digest="",
            dataset_digest="",
        )
        name = CheckpointName("loop", progress.step, self._incarnation)
        return self.saver.stage(name, info=info, must=must)

    def store_segments(self) -> None:
        """Ranks that save together have no segments."""

    def close(self, reason: str, *, deadline_s: float | None = None) -> None:
        del reason
        self.saver.close(deadline_s)

    def abandon(self, reason: str, *, deadline_s: float | None = None) -> None:
        try:
            self.close(reason, deadline_s=deadline_s)
        except PerdureError as error:
            self._world.events("warning", {"message": f"while the run was closed: {error}"})


def join_run(
    world: World,
    *,
    registry: Registry,
    options: CheckpointOptions,
    how: Restoring,
    restored: Callable[[Choice | None], None],
) -> OpenRun:
    """Restore what the first rank has chosen; see ``open_run``."""
    team = world.team
    message = team.hear()
    saver = checkpointer(world, registry=registry, options=options, ledger=MemoryLedger())

    def restore() -> None:
        _require_same_run(world, message)
        restore_chosen(saver, _chosen(world.storage, message["choice"]), how, restored)

    run = JoinedRun(world, saver, IncarnationNumber(message["incarnation"]))
    try:
        team.together(restore)
        team.hear()
        team.together(saver.reserve)
        saver.require_agreement()
    except BaseException:
        run.abandon("not started")
        raise
    return run


def _require_same_run(world: World, message: Mapping[str, Any]) -> None:
    try:
        found = read_run(world.storage).run_id
    except NothingToResumeError:
        found = ""
    if found != message["run_id"]:
        raise ConfigError(
            "is another directory here than on rank 0",
            where=str(world.run_dir),
            rule="all ranks write into one run directory, which all of them see",
            way_out="name a directory on a disk that all machines share",
        )


def _chosen(storage: Storage, choice: Mapping[str, Any] | None) -> Choice | None:
    """The checkpoint that the first rank has verified; only its manifest is read here."""
    if choice is None:
        return None
    name = CheckpointName(choice["phase"], choice["step"], IncarnationNumber(choice["incarnation"]))
    digest = choice["manifest_digest"]
    unknown = LogPosition(name.incarnation, 0, 0)
    record = Checkpointed(name.directory, name.phase, name.step, digest, unknown)
    skipped = tuple((directory, reason) for directory, reason in choice["skipped"])
    return Choice(name, committed_manifest(storage, record), skipped)
