"""Collecting checkpoints: for an engine at work, and for whoever has claimed a run to tidy it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from perdure.checkpoint import retention
from perdure.checkpoint.keep import Keep, MetricsOf, why_kept
from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.manifest import directory_path
from perdure.checkpoint.segments.store import SegmentStore
from perdure.checkpoint.tier.pins import Pins
from perdure.checkpoint.tier.pull import PULLED_FILE
from perdure.checkpoint.verification import quarantined, verify
from perdure.core.errors import DamagedError
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage


@dataclass(frozen=True, slots=True)
class Collector:
    """Deletes what the ledger has acknowledged as collected. Only the run's holder may use it.

    Attributes:
        timeout_s: Longest wait for the ledger's acknowledgement.
    """

    storage: Storage
    ledger: CommitLedger
    segments: SegmentStore
    faults: FaultHook
    events: EventSink
    timeout_s: float

    def collect(self, directories: tuple[str, ...]) -> None:
        """List these as collected, then delete them.

        Raises:
            StorageError: The storage or the ledger refused.
            TimeoutError: No acknowledgement in time; nothing was deleted.
        """
        retention.collect(
            self.storage,
            directories,
            ledger=self.ledger,
            faults=self.faults,
            timeout_s=self.timeout_s,
            segments=self.segments,
        )
        self.events("checkpoint_collected", {"names": ",".join(directories)})

    def sweep(self, collected: Sequence[str]) -> tuple[str, ...]:
        """Delete what earlier incarnations left behind; see ``Checkpointer.sweep``."""
        leftovers = left_behind(self.storage, self.ledger.committed(), collected)
        retention.release_segments(self.storage, leftovers.stale, self.segments)
        for directory in leftovers.stale:
            retention.remove(self.storage, directory)
        if leftovers.cut_off or leftovers.lost:
            self.collect(leftovers.cut_off + leftovers.lost)
        if self.storage.exists(PULLED_FILE) and not _absent(self.storage, self.ledger.committed()):
            self.storage.remove(PULLED_FILE)
            self.storage.sync_dir("")
        return leftovers.stale + leftovers.cut_off + leftovers.lost


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What earlier incarnations left behind.

    Attributes:
        stale: Directories that are listed as collected and still there.
        cut_off: Directories with neither manifest nor commit, and segments that nothing names.
        lost: Committed ones that were lost with the disk that the run was pulled away from.
    """

    stale: tuple[str, ...]
    cut_off: tuple[str, ...]
    lost: tuple[str, ...]


def left_behind(
    storage: Storage, committed: Sequence[Checkpointed], collected: Sequence[str]
) -> Leftovers:
    """Look for leftovers; changes nothing.

    Args:
        storage: The run's storage.
        committed: Commits of the kept lineage.
        collected: What the ledger lists as collected.
    """
    named = {record.directory for record in committed}
    stale = tuple(
        directory
        for directory in dict.fromkeys(collected)
        if directory not in named and storage.exists(directory_path(directory))
    )
    cut_off = (
        *retention.orphans(storage, committed),
        *retention.orphan_segments(storage, committed),
    )
    return Leftovers(stale, cut_off, _lost(storage, committed))


def _lost(storage: Storage, committed: Sequence[Checkpointed]) -> tuple[str, ...]:
    if not storage.exists(PULLED_FILE):
        return ()
    return Pins(storage).let_go(_absent(storage, committed))


def _absent(storage: Storage, committed: Sequence[Checkpointed]) -> list[str]:
    """Committed ones that are neither in their place nor set aside."""
    names = [record.directory for record in committed]
    absent = [name for name in names if not storage.exists(directory_path(name))]
    return [name for name in absent if quarantined(storage, name) is None]


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """Which checkpoints stay and which go.

    Attributes:
        verified: The newest one whose every byte is right; it always stays.
        kept: Directories that stay, oldest first, with the reasons.
        surplus: Directories that go, oldest first.
    """

    verified: str
    kept: Mapping[str, tuple[str, ...]]
    surplus: tuple[str, ...]


def plan_collection(
    storage: Storage,
    committed: Sequence[Checkpointed],
    *,
    rules: Keep,
    metrics_of: MetricsOf,
    pinned: Collection[str] = (),
    executor: Executor | None = None,
) -> CollectionPlan:
    """Apply the rules of retention; changes nothing.

    Stay: what the rules keep, the newest that verifies, byte by byte, and what is pinned.

    Args:
        storage: The run's storage.
        committed: Commits of the kept lineage, oldest first.
        rules: What to keep.
        metrics_of: Says by which values the best are chosen.
        pinned: Directories that the remote tier needs.
        executor: Checks several files at once.

    Raises:
        DamagedError: None of them verifies; then none may go.
        FutureFormatError: The newest is of a newer format.
    """
    there = retention.present(storage, committed)
    verified = ""
    for record in reversed(there):
        digest = record.manifest_digest
        report = verify(storage, record.directory, manifest_digest=digest, executor=executor)
        if report.ok:
            verified = record.directory
            break
    if there and not verified:
        raise DamagedError(
            f"none of {len(there)} checkpoints is whole",
            where="checkpoints",
            rule="nothing is deleted while there is no verified checkpoint",
            way_out="restore one of them from a copy",
        )
    reasons = reasons_to_stay(
        there, rules, metrics_of=metrics_of, pinned=pinned, verified=(verified,)
    )
    surplus = tuple(name for name, why in reasons.items() if not why)
    return CollectionPlan(verified, {name: why for name, why in reasons.items() if why}, surplus)


def reasons_to_stay(
    there: Sequence[Checkpointed],
    rules: Keep,
    *,
    metrics_of: MetricsOf,
    pinned: Collection[str],
    verified: Collection[str] = (),
) -> dict[str, tuple[str, ...]]:
    """As :func:`~perdure.checkpoint.keep.why_kept`; ``remote`` is the reason of what is pinned."""
    reasons = why_kept(there, rules, metrics_of=metrics_of, verified=verified)
    return {name: (*why, "remote") if name in pinned else why for name, why in reasons.items()}
