"""Storing the newest checkpoint of a run once more, with its components migrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perdure.checkpoint import (
    Checkpointer,
    CheckpointOptions,
    CheckpointReader,
    Manifest,
    Migrations,
    verify,
)
from perdure.checkpoint.stored import outdated, stored_registry
from perdure.core.errors import DamagedError, NothingToResumeError
from perdure.core.ids import CheckpointName
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage
from perdure.experience import read_experience
from perdure.runtime.log_reach import log_end
from perdure.runtime.maintenance import HeldRun, Place, held


@dataclass(frozen=True, slots=True)
class Migrated:
    """What was migrated.

    Attributes:
        source: The newest whole checkpoint.
        target: The new one; empty if there was nothing to do.
        versions: Component → schema version before and after.
    """

    source: str
    target: str
    versions: dict[str, tuple[int, int]]


def migrate_run(place: Place, migrations: Migrations) -> Migrated:
    """Write the newest whole checkpoint again under a new incarnation, migrated.

    The one it came from stays as it is, and so do all others. Without anything to migrate the run
    is not even claimed.

    Args:
        place: The run.
        migrations: Applied as far as they lead.

    Raises:
        NothingToResumeError: Nothing was committed yet.
        RunBusyError: A live process holds the run.
        DamagedError: No checkpoint is whole.
        ConfigError: A migration has failed; nothing was written.
        StorageError: The new checkpoint could not be made durable.
    """
    storage = place.storage
    source = _newest_whole(storage, read_experience(storage)[0].checkpoints)
    if not outdated(source, migrations):
        return Migrated(source.name.directory, "", {})
    # A failing migration is learned of before the run is claimed.
    stored_registry(CheckpointReader(storage, source), migrations)
    with held(place, reason="migrated") as run:
        source = _newest_whole(storage, run.ledger.committed())
        target = _store(place, run, source, migrations)
    return Migrated(source.name.directory, target, outdated(source, migrations))


def _newest_whole(storage: Storage, committed: Sequence[Checkpointed]) -> Manifest:
    if not committed:
        raise NothingToResumeError(
            "no checkpoint was committed yet", where="checkpoints", way_out="let the run go on"
        )
    for record in reversed(committed):
        report = verify(
            storage,
            record.directory,
            manifest_digest=record.manifest_digest,
            segments="index",
        )
        if report.ok and report.manifest is not None:
            return report.manifest
    raise DamagedError(
        f"none of {len(committed)} checkpoints is whole",
        where="checkpoints",
        way_out="restore one of them from a copy",
    )


def _store(place: Place, run: HeldRun, source: Manifest, migrations: Migrations) -> str:
    reader = CheckpointReader(place.storage, source)
    incarnation = run.store.incarnation
    name = CheckpointName(source.name.phase, source.name.step, incarnation)
    lineage = {
        **source.info.lineage,
        "incarnation": incarnation,
        "parent": run.claimed.parent,
        "migrated_from": source.name.directory,
        **log_end(run.store.position),
    }
    info = replace(source.info, lineage=lineage, experience=reader.experience())
    keep = len(run.ledger.committed()) + 1
    engine = Checkpointer(
        place.storage,
        registry=stored_registry(reader, migrations),
        ledger=run.ledger,
        clock=place.clock,
        faults=place.faults,
        events=place.events,
        options=CheckpointOptions(keep=keep, arenas=1, writer="thread"),
    )
    try:
        engine.stage(name, info=info, must=True)
    finally:
        engine.close()
    return name.directory
