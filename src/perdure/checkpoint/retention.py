"""Which checkpoints are kept, and how the others leave: listed first, deleted afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.manifest import CHECKPOINTS, LATEST, MANIFEST, directory_path
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.records import Checkpointed, Collect
from perdure.core.storage_api import Storage


def surplus(
    committed: Sequence[Checkpointed], *, keep: int, verified: Collection[str]
) -> tuple[str, ...]:
    """Directories that may go: all but the newest ``keep`` and the last verified one.

    Args:
        committed: Commits that still have their directory, oldest first.
        keep: How many of the newest stay, at least 1.
        verified: Directories whose every byte was checked by this process.
    """
    last_verified = [record.directory for record in committed if record.directory in verified][-1:]
    if not last_verified:
        return ()
    return tuple(
        record.directory for record in committed[:-keep] if record.directory not in last_verified
    )


def present(storage: Storage, committed: Iterable[Checkpointed]) -> list[Checkpointed]:
    """Commits whose checkpoint is still in its place (damaged ones are in quarantine)."""
    return [
        record
        for record in committed
        if storage.exists(f"{directory_path(record.directory)}/{MANIFEST}")
    ]


def orphans(storage: Storage, committed: Iterable[Checkpointed]) -> tuple[str, ...]:
    """Directories without manifest and without commit: saves that were cut off."""
    names = {record.directory for record in committed}
    return tuple(
        name
        for name in storage.list(CHECKPOINTS)
        if name != LATEST
        and name not in names
        and not storage.exists(f"{CHECKPOINTS}/{name}/{MANIFEST}")
    )


def collect(
    storage: Storage,
    directories: tuple[str, ...],
    *,
    ledger: CommitLedger,
    faults: FaultHook,
    timeout_s: float,
) -> None:
    """Delete checkpoints after the ledger has acknowledged that they go.

    Raises:
        StorageError: The storage or the ledger refused.
        TimeoutError: No acknowledgement in time; nothing was deleted.
    """
    ledger.collect(Collect(directories)).result(timeout=timeout_s)
    faults.reach(FaultPoint.COLLECT_LOGGED)
    for directory in directories:
        remove(storage, directory)
    faults.reach(FaultPoint.COLLECTED)


def remove(storage: Storage, directory: str) -> None:
    """Delete one checkpoint: first it stops being one, then its bytes go."""
    path = directory_path(directory)
    if storage.exists(f"{path}/{MANIFEST}"):
        storage.remove(f"{path}/{MANIFEST}")
        storage.sync_dir(path)
    storage.remove(path)
    storage.sync_dir(CHECKPOINTS)
