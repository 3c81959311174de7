"""Which checkpoints are kept, and how the others leave: listed first, deleted afterwards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from perdure.checkpoint.keep import Keep, Metrics
from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.manifest import CHECKPOINTS, MANIFEST, directory_path
from perdure.checkpoint.segments.store import SEGMENTS, SUFFIX, SegmentStore, files
from perdure.checkpoint.verification import QUARANTINE, committed_manifest
from perdure.core.errors import DamagedError, FutureFormatError, StorageError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import CheckpointName
from perdure.core.records import Checkpointed, Collect
from perdure.core.storage_api import Storage

_SEGMENT_PATH = re.compile(rf"{SEGMENTS}/[A-Za-z0-9_/-]+\{SUFFIX}".encode())


@dataclass(frozen=True, slots=True)
class KnownMetrics:
    """Metrics of checkpoints, of their manifests and of the ledger. Each manifest is read once."""

    storage: Storage
    ledger: CommitLedger
    _stored: dict[str, Metrics] = field(default_factory=dict[str, Metrics], init=False)

    def __call__(self, record: Checkpointed) -> Metrics | None:
        """None if the manifest is damaged or cannot be read now."""
        if record.directory not in self._stored:
            try:
                manifest = committed_manifest(self.storage, record)
            except (DamagedError, FutureFormatError, StorageError):
                return None
            self._stored[record.directory] = manifest.info.metrics
        return {**self._stored[record.directory], **self.ledger.metrics(record)}


def recorded_rules(storage: Storage, committed: Sequence[Checkpointed]) -> Keep | None:
    """The rules that the newest checkpoint says its run has; None if none can be read."""
    for record in reversed(committed):
        try:
            return committed_manifest(storage, record).info.keep
        except (DamagedError, FutureFormatError, StorageError):
            continue
    return None


def present(storage: Storage, committed: Iterable[Checkpointed]) -> list[Checkpointed]:
    """Commits whose checkpoint is still in its place (damaged ones are in quarantine)."""
    return [
        record
        for record in committed
        if storage.exists(f"{directory_path(record.directory)}/{MANIFEST}")
    ]


def orphans(storage: Storage, committed: Iterable[Checkpointed]) -> tuple[str, ...]:
    """Directories without manifest and without commit: saves that were cut off.

    What is not called like a checkpoint is not one, and nothing to be deleted.
    """
    names = {record.directory for record in committed}
    return tuple(
        name
        for name in storage.list(CHECKPOINTS)
        if CheckpointName.could_name(name)
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
    segments: SegmentStore,
) -> None:
    """Delete checkpoints after the ledger has acknowledged that they go.

    The segments that they alone name go first, so that whoever has to finish this can still read
    which they are. Paths of segments that nothing names may stand among ``directories``.

    Raises:
        StorageError: The storage or the ledger refused.
        TimeoutError: No acknowledgement in time; nothing was deleted.
    """
    ledger.collect(Collect(directories)).result(timeout=timeout_s)
    faults.reach(FaultPoint.COLLECT_LOGGED)
    orphaned = [name for name in directories if name.startswith(f"{SEGMENTS}/")]
    segments.delete(orphaned)
    checkpoints = [name for name in directories if name not in orphaned]
    if release_segments(storage, checkpoints, segments) or orphaned:
        faults.reach(FaultPoint.SEGMENTS_COLLECTED)
    for directory in checkpoints:
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


def release_segments(storage: Storage, directories: Collection[str], segments: SegmentStore) -> int:
    """Delete the segments that only these collected checkpoints name; returns how many.

    Whatever has a manifest counts, committed or not, in its place or in quarantine, readable or
    damaged. If one cannot be read now, nothing is deleted.
    """
    going: set[str] = set()
    for directory in directories:
        going |= _named_in(storage, f"{directory_path(directory)}/{MANIFEST}")
    if not going:
        return 0
    try:
        alone = going - named_segments(storage, but=directories)
    except StorageError:
        return 0
    segments.delete(alone)
    return len(alone)


def named_segments(storage: Storage, *, but: Collection[str] = ()) -> set[str]:
    """Paths of all segments that any manifest names, those in the directories ``but`` left out.

    Raises:
        StorageError: One cannot be read.
    """
    named: set[str] = set()
    for directory in storage.list(CHECKPOINTS):
        if directory not in but:
            named |= _named_in(storage, f"{CHECKPOINTS}/{directory}/{MANIFEST}")
    for name in storage.list(QUARANTINE):
        named |= _named_in(storage, f"{QUARANTINE}/{name}/{MANIFEST}")
    return named


def orphan_segments(storage: Storage, committed: Sequence[Checkpointed]) -> tuple[str, ...]:
    """Segments that nothing names: saves that were cut off have left them.

    None, if a committed checkpoint is not where it should be: somebody may put it back; and none,
    if a manifest cannot be read now.
    """
    try:
        return _orphan_segments(storage, committed)
    except StorageError:
        return ()


def _orphan_segments(storage: Storage, committed: Sequence[Checkpointed]) -> tuple[str, ...]:
    present_ones = {record.directory for record in present(storage, committed)}
    if any(
        record.directory not in present_ones and not _is_set_aside(storage, record)
        for record in committed
    ):
        return ()
    found = files(storage)
    if not found:
        return ()
    named = named_segments(storage)
    return tuple(path for path in found if path not in named)


def _is_set_aside(storage: Storage, record: Checkpointed) -> bool:
    return storage.exists(f"{QUARANTINE}/{record.directory}/{MANIFEST}")


def _named_in(storage: Storage, manifest: str) -> set[str]:
    """:func:`segments_in` of a manifest; none if there is none."""
    try:
        return segments_in(storage.read(manifest)) if storage.exists(manifest) else set()
    except FileNotFoundError:
        return set()


def segments_in(manifest: bytes) -> set[str]:
    """Every path of a segment that the bytes of a manifest hold, whether it is whole or not."""
    return {path.decode() for path in _SEGMENT_PATH.findall(manifest)}
