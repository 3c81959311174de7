"""The checkpoint engine: stage in the caller's thread; write, verify, commit and retain behind it.

Order of one save, every arrow durable before the next begins: files → manifest → ``checkpointed``
acknowledged → ``latest.json`` → ``collect`` acknowledged → older directories deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from perdure.checkpoint import retention, verification, writer
from perdure.checkpoint.arena import Arena
from perdure.checkpoint.collector import Collector
from perdure.checkpoint.guard import TornCopyError
from perdure.checkpoint.image_files import ImageFiles, image_files, share_from
from perdure.checkpoint.ledger import CheckpointTier, CommitLedger
from perdure.checkpoint.manifest import (
    LATEST,
    Manifest,
    StagedInfo,
    directory_path,
)
from perdure.checkpoint.options import CheckpointOptions
from perdure.checkpoint.registry import Registry
from perdure.checkpoint.restoration import Loading, restore
from perdure.checkpoint.segments.store import SegmentStore
from perdure.checkpoint.snapshot import Snapshot, Stager
from perdure.checkpoint.verification import Choice, SegmentCheck, VerifyReport
from perdure.core import sealed_json
from perdure.core.clock import Clock
from perdure.core.components import Segment, Segmented
from perdure.core.errors import ConfigError, PerdureError, StorageError
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import CheckpointName, IncarnationNumber
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage

__all__ = ["CheckpointEngine", "CheckpointOptions", "StagedInfo"]

MUST_TRIES = 5
"""How often a save that must succeed copies a state that keeps changing."""

SaveError = PerdureError | OSError
"""What a save may fail with while training goes on."""


@dataclass(slots=True)
class CheckpointEngine:
    """Saves and restores the registered components of one run.

    All methods are called from one thread, the owner's. Saves run one after another on
    ``executor``, a single thread by default. A save that the storage or the ledger refuses leaves
    the older checkpoints as they are, is reported (event ``checkpoint_failed``,
    :attr:`last_error`), and training goes on; any other exception of a save is raised to the owner
    by the next :meth:`stage`, :meth:`wait` or :meth:`close`.
    """

    storage: Storage
    registry: Registry = field(kw_only=True)
    ledger: CommitLedger = field(kw_only=True)
    clock: Clock = field(kw_only=True)
    faults: FaultHook = field(kw_only=True)
    events: EventSink = field(kw_only=True)
    options: CheckpointOptions = field(default=CheckpointOptions(), kw_only=True)
    executor: Executor | None = field(default=None, kw_only=True)
    tier: CheckpointTier | None = field(default=None, kw_only=True)
    """Ships commits elsewhere; may be set until the first save."""

    last_error: SaveError | None = field(default=None, init=False)
    """Why the newest save failed; None once a later one is committed."""
    skipped: int = field(default=0, init=False)
    """Saves that were due while all arenas were busy."""
    torn: int = field(default=0, init=False)
    """Copies that were thrown away because the state changed while it was copied."""
    failed: int = field(default=0, init=False)

    _executor: Executor = field(init=False, repr=False)
    _stager: Stager = field(init=False, repr=False)
    _images: ImageFiles = field(init=False, repr=False)
    _arenas: tuple[Arena, ...] = field(init=False, repr=False)
    _free: deque[Arena] = field(init=False, repr=False)
    _pending: deque[Future[SaveError | None]] = field(init=False, repr=False)
    _used: set[str] = field(init=False, repr=False)
    _verified: set[str] = field(init=False, repr=False)
    _segments: SegmentStore = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._executor = self.executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        options = self.options
        self._stager = Stager(self.clock, arenas=options.arenas)
        self._images = image_files(
            self.storage,
            writer=options.writer,
            stall_s=options.stall_timeout_s,
            events=self.events,
        )
        share = share_from(options.writer)
        self._arenas = tuple(Arena(share_from=share) for _ in range(options.arenas))
        self._free = deque(self._arenas)
        self._pending = deque()
        self._used = set()
        self._verified = set()
        self._segments = SegmentStore(
            self.storage, clock=self.clock, faults=self.faults, events=self.events
        )

    @property
    def arena_bytes(self) -> int:
        """Host memory held for staging now; at most ``arenas`` times a checkpoint's tensors."""
        return sum(arena.nbytes for arena in self._arenas)

    def reserve(self) -> int:
        """Take all memory that saving the components as they are now will ever need.

        Without it each arena is made by the first save that uses it, which blocks for longer.

        Returns:
            Bytes: :attr:`arena_bytes` from now on.

        Raises:
            ConfigError: A required component is missing, or a state cannot be stored.
        """
        size = self._stager.size_of(self.registry.entries())
        for arena in self._free:
            arena.fit(size)
        return self.arena_bytes

    @property
    def pending(self) -> int:
        """Saves that are handed over and not ended yet."""
        return sum(not saving.done() for saving in self._pending)

    def stage(self, name: CheckpointName, *, info: StagedInfo, must: bool = False) -> bool:
        """Copy all components; become durable in the background.

        After return nothing of the caller's is referred to. With all arenas busy the save is
        skipped, counted and reported, never waited for; so is a copy that was torn by a change.

        Args:
            name: A name never used before.
            info: The run at this moment.
            must: Wait for a free arena and for the commit, and raise what prevented it.

        Returns:
            False if it was skipped.

        Raises:
            ConfigError: The name is taken, a required component is missing, or a state cannot be
                stored.
            StorageError: ``must`` and the save failed or did not end in time, or the state changed
                during every copy.
        """
        self._reap()
        self._refuse_used(name)
        if must and not self._free and not self.wait(self.options.must_timeout_s):
            raise self._too_slow(name.directory)
        if not self._free:
            self.skipped += 1
            self.events("checkpoint_skipped", {"step": name.step, "reason": "all arenas are busy"})
            return False
        saving = self._untorn(name, info, tries=MUST_TRIES if must else 1)
        if saving is not None and must:
            self._await_commit(name.directory, saving)
        if saving is None and must:
            raise StorageError(
                f"the state changed during each of {MUST_TRIES} copies",
                where=name.directory,
                rule="a torn copy is never saved",
                way_out="save between changes of the state",
            )
        return saving is not None

    def store_segments(self, incarnation: IncarnationNumber) -> bool:
        """Store whole segments in the background, so that the next save finds little to write.

        Cheap when there is nothing to store; meant to be called often, at safe points. Never
        waits: while a save or an earlier call is in progress nothing happens.

        Args:
            incarnation: That of the run.

        Returns:
            Whether something is being stored.
        """
        self._reap()
        if self._pending:
            return False
        fresh = {
            entry.name: [one for one in entry.component.sealed() if one.stored is None]
            for entry in self.registry.entries()
            if isinstance(entry.component, Segmented)
        }
        parts = {name: segments for name, segments in fresh.items() if segments}
        if parts:
            self._pending.append(self._executor.submit(self._store, parts, incarnation))
        return bool(parts)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no save is pending; False if some still are after ``timeout_s``."""
        deadline_s = self.clock.monotonic_s() + timeout_s
        while self._pending:
            saving = self._pending[0]
            try:
                saving.exception(timeout=max(0.0, deadline_s - self.clock.monotonic_s()))
            except TimeoutError:
                return False
            self._reap()
        return True

    def close(self) -> None:
        """Wait for pending saves, end the thread and the process, give the arenas back.

        Raises:
            StorageError: A save did not end within ``must_timeout_s``.
        """
        drained = False
        try:
            drained = self.wait(self.options.must_timeout_s)
        finally:
            if self.executor is None:
                self._executor.shutdown(wait=drained, cancel_futures=True)
        if not drained:
            raise self._too_slow("checkpoints")
        self._images.close()
        for arena in self._arenas:
            arena.close()

    def verify(self, directory: str) -> VerifyReport:
        """Check every byte of a checkpoint, and its manifest against the ledger."""
        digests = {record.directory: record.manifest_digest for record in self.ledger.committed()}
        digest = digests.get(directory, "")
        return verification.verify(self.storage, directory, manifest_digest=digest)

    def choose(
        self, committed: Sequence[Checkpointed], *, segments: SegmentCheck = "index"
    ) -> Choice:
        """The newest checkpoint that is whole; see :func:`~perdure.checkpoint.choose`."""
        choice = verification.choose(self.storage, committed, events=self.events, segments=segments)
        self._verified.add(choice.directory)
        return choice

    def restore(
        self,
        choice: Choice,
        *,
        only: Collection[str] | None = None,
        cold: Collection[str] = (),
        allow_legacy: bool = False,
    ) -> None:
        """Load the components in place; see :func:`~perdure.checkpoint.restore`.

        Args:
            choice: The checkpoint, as chosen.
            only: Names to load; None = all.
            cold: Segmented components that start without their rows.
            allow_legacy: Whether pickles may be opened, which runs the code they name.
        """
        entries = self.registry.entries()
        how = Loading(cold, self._segments, self.registry.migrations, allow_legacy)
        restore(self.storage, choice, entries, faults=self.faults, only=only, how=how)
        self.events("restored", {"name": choice.directory, "step": choice.name.step})

    def sweep(self, collected: Sequence[str] = ()) -> tuple[str, ...]:
        """Delete what earlier incarnations left behind; returns the directories and segments.

        That is: directories the ledger lists as collected, and what saves that were cut off have
        left (directories with neither manifest nor commit, segments that no manifest names), which
        is listed as collected first. Call it after the run was claimed and before the first save.
        Anything with a manifest that was not collected stays.
        """
        return self._collector.sweep(collected)

    def _refuse_used(self, name: CheckpointName) -> None:
        committed = {record.directory for record in self.ledger.committed()}
        if name.directory in self._used or name.directory in committed:
            raise ConfigError(
                "a checkpoint of this name exists",
                where=name.directory,
                rule="a checkpoint is never overwritten",
                way_out="save under another step",
            )

    def _untorn(
        self, name: CheckpointName, info: StagedInfo, *, tries: int
    ) -> Future[SaveError | None] | None:
        """Hand a whole copy over; None if every one was torn."""
        for _ in range(tries):
            try:
                return self._hand_over(name, info)
            except TornCopyError as torn:
                self.torn += 1
                reason = f"changed while it was copied: {', '.join(torn.args)}"
                self.events("checkpoint_skipped", {"step": name.step, "reason": reason})
        return None

    def _hand_over(self, name: CheckpointName, info: StagedInfo) -> Future[SaveError | None]:
        started_s = self.clock.monotonic_s()
        entries = self.registry.entries()
        arena = self._free.popleft()
        handed = False
        try:
            snapshot = self._stager.stage(name, info=info, entries=entries, arena=arena)
            blocked_ms = (self.clock.monotonic_s() - started_s) * 1e3
            self.events(
                "checkpoint_staged",
                {"step": name.step, "blocked_ms": blocked_ms, "bytes": snapshot.bytes},
            )
            self.faults.reach(FaultPoint.CHECKPOINT_STAGED)
            self._used.add(name.directory)
            saving = self._executor.submit(self._save, snapshot)
            handed = True
        finally:
            if not handed:
                self._free.append(arena)
        self._pending.append(saving)
        return saving

    def _await_commit(self, directory: str, saving: Future[SaveError | None]) -> None:
        if not self.wait(self.options.must_timeout_s):
            raise self._too_slow(directory)
        error = saving.result()
        if isinstance(error, OSError):
            raise StorageError(f"could not be saved ({error!r})", where=directory) from error
        if error is not None:
            raise error

    def _reap(self) -> None:
        """Take finished saves off the list; what they did not expect is raised here."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def _save(self, snapshot: Snapshot) -> SaveError | None:
        """One save, on the executor; returns what kept it from being committed."""
        name = snapshot.manifest.name
        started_s = self.clock.monotonic_s()
        writing = False
        try:
            writer.require_empty(self.storage, name.directory)
            stored = self._segments.make_durable(snapshot.segments, name.incarnation)
            snapshot = snapshot.naming(stored)
            writing = True
            manifest, digest = writer.write(
                self.storage, snapshot, self.faults, images=self._images
            )
        except (PerdureError, OSError) as error:
            if writing:
                self._discard(name)
            return self._report(name, error)
        finally:
            self._free.append(snapshot.arena)
        self._verified.add(name.directory)
        try:
            self._commit(manifest, digest, started_s)
        except (PerdureError, OSError) as error:
            return self._report(name, error)
        self.last_error = None
        try:
            self._segments.named_now(manifest.segments)
            self._point_to(name, digest)
            self._retain()
            if self.tier is not None:
                self.tier.notify()
        except (PerdureError, OSError) as error:
            self._report(name, error)
        return None

    def _store(
        self, parts: Mapping[str, Sequence[Segment]], incarnation: IncarnationNumber
    ) -> SaveError | None:
        """Store segments, on the executor; what fails is tried again by the next save."""
        try:
            self._segments.make_durable(parts, incarnation)
        except (PerdureError, OSError) as error:
            self.events("warning", {"message": f"segments could not be stored yet ({error})"})
            return error
        return None

    def _report(self, name: CheckpointName, error: SaveError) -> SaveError:
        self.failed += 1
        self.last_error = error
        text = str(error) or repr(error)
        self.events("checkpoint_failed", {"step": name.step, "name": name.directory, "error": text})
        return error

    def _commit(self, manifest: Manifest, digest: str, started_s: float) -> None:
        name = manifest.name
        record = Checkpointed(
            directory=name.directory,
            phase=name.phase,
            step=name.step,
            manifest_digest=digest,
            position=manifest.info.position,
        )
        self.ledger.commit(record).result(timeout=self.options.commit_timeout_s)
        self.faults.reach(FaultPoint.CHECKPOINT_LOGGED)
        write_ms = (self.clock.monotonic_s() - started_s) * 1e3
        fields = {"step": name.step, "name": name.directory, "write_ms": write_ms}
        self.events("checkpoint_committed", {**fields, "bytes": manifest.bytes})

    def _point_to(self, name: CheckpointName, digest: str) -> None:
        pointer = {"format": 1, "directory": name.directory, "manifest_digest": digest}
        self.storage.write_atomic(directory_path(LATEST), sealed_json.encode(pointer))
        self.faults.reach(FaultPoint.POINTER_WRITTEN)

    def _retain(self) -> None:
        kept = retention.present(self.storage, self.ledger.committed())
        surplus = retention.surplus(kept, keep=self.options.keep, verified=self._verified)
        if surplus and self.tier is not None:
            surplus = self.tier.let_go(surplus)
        if surplus:
            self._collector.collect(surplus)

    @property
    def _collector(self) -> Collector:
        return Collector(
            self.storage,
            self.ledger,
            self._segments,
            self.faults,
            self.events,
            timeout_s=self.options.commit_timeout_s,
        )

    def _discard(self, name: CheckpointName) -> None:
        """Free what a failed save has written; it was never a checkpoint."""
        try:
            retention.remove(self.storage, name.directory)
            self._used.discard(name.directory)
        except (PerdureError, OSError) as error:
            message = f"{name.directory}: could not remove a failed save ({error})"
            self.events("warning", {"message": message})

    def _too_slow(self, where: str) -> StorageError:
        return StorageError(
            f"a save did not end within {self.options.must_timeout_s:g} s",
            where=where,
            way_out="look at the disk, or raise the limit",
        )
