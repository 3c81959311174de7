"""From a staged copy to a committed checkpoint: write, verify, commit, retain, one save at a time.

Order of one save, every arrow durable before the next begins: files → manifest → ``checkpointed``
acknowledged → ``latest.json`` → ``collect`` acknowledged → older directories deleted.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from perdure.checkpoint import retention, writer
from perdure.checkpoint.arena import Arena
from perdure.checkpoint.collector import Collector
from perdure.checkpoint.image_files import ImageFiles, image_files, share_from
from perdure.checkpoint.keep import MetricsOf, why_kept
from perdure.checkpoint.ledger import CheckpointTier, CommitLedger
from perdure.checkpoint.manifest import LATEST, Manifest, directory_path
from perdure.checkpoint.options import CheckpointOptions
from perdure.checkpoint.segments.store import SegmentStore
from perdure.checkpoint.snapshot import Snapshot
from perdure.checkpoint.team import Turn
from perdure.core import sealed_json
from perdure.core.clock import Clock
from perdure.core.components import Segment
from perdure.core.errors import FencedError, PerdureError, StorageError, without_frames
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import CheckpointName, IncarnationNumber
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage

SaveError = PerdureError | OSError
"""What a save may fail with while training goes on."""


@dataclass(slots=True)
class SavePipeline:
    """Owns the arenas, the names in use and what became of the saves.

    The owner's thread takes an arena, fills it and submits it; everything behind that runs on
    ``executor``, which gives the arena back once its files are written. A save that the storage or
    the ledger refuses leaves the older checkpoints as they are and is reported; any other exception
    is raised to the owner by the next :meth:`reap`.
    """

    storage: Storage
    ledger: CommitLedger = field(kw_only=True)
    clock: Clock = field(kw_only=True)
    faults: FaultHook = field(kw_only=True)
    events: EventSink = field(kw_only=True)
    options: CheckpointOptions = field(kw_only=True)
    executor: Executor | None = field(default=None, kw_only=True)
    """A single thread by default, ended by :meth:`close`; one that is passed in stays."""
    tier: CheckpointTier | None = field(default=None, kw_only=True)

    last_error: SaveError | None = field(default=None, init=False)
    """Why the newest save failed; None once a later one is committed."""
    failed: int = field(default=0, init=False)
    verified: set[str] = field(default_factory=set[str], init=False)
    """Directories whose every byte was checked by this process."""
    segments: SegmentStore = field(init=False)
    arenas: tuple[Arena, ...] = field(init=False)

    _free: deque[Arena] = field(init=False, repr=False)
    _used: set[str] = field(default_factory=set[str], init=False, repr=False)
    _pending: deque[Future[SaveError | None]] = field(init=False, repr=False)
    _executor: Executor = field(init=False, repr=False)
    _images: ImageFiles = field(init=False, repr=False)
    _metrics_of: MetricsOf = field(init=False, repr=False)
    _warned: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        options = self.options
        self._executor = self.executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._images = image_files(
            self.storage,
            writer=options.writer,
            stall_s=options.stall_timeout_s,
            events=self.events,
        )
        share = share_from(options.writer)
        self.arenas = tuple(Arena(share_from=share) for _ in range(options.arenas))
        self._free = deque(self.arenas)
        self._pending = deque()
        self._metrics_of = retention.KnownMetrics(self.storage, self.ledger)
        self.segments = SegmentStore(
            self.storage, clock=self.clock, faults=self.faults, events=self.events
        )

    @property
    def pending(self) -> int:
        """Jobs that are handed over and not ended yet."""
        return sum(not job.done() for job in self._pending)

    @property
    def busy(self) -> bool:
        """Whether every arena is in use."""
        return not self._free

    def reserve(self, size: int) -> None:
        """Give every free arena ``size`` bytes."""
        for arena in self._free:
            arena.fit(size)

    def take_arena(self) -> Arena:
        """A free arena, the caller's until it is submitted or given back."""
        return self._free.popleft()

    def give_back(self, arena: Arena) -> None:
        """It was not submitted."""
        self._free.append(arena)

    def is_used(self, directory: str) -> bool:
        """Whether a checkpoint has that name, or may get it yet."""
        committed = {record.directory for record in self.ledger.committed()}
        return directory in self._used or directory in committed

    def submit(self, snapshot: Snapshot, turn: Turn) -> Future[SaveError | None]:
        """Save what an arena holds; the future says what kept it from being committed.

        Args:
            snapshot: What was staged.
            turn: Which save of all ranks it is.
        """
        self._used.add(snapshot.manifest.name.directory)
        job = self._lead if turn.leads else self._follow
        saving = self._executor.submit(job, snapshot, turn)
        self._pending.append(saving)
        return saving

    def decline(self, turn: Turn, reason: str) -> None:
        """Nothing was submitted for this save: let the other ranks know."""
        if turn.alone:
            return
        refused = StorageError(
            reason,
            where=f"rank {turn.rank}",
            rule="a checkpoint has the shares of all ranks, or is none",
            way_out="see what this rank reports; the checkpoint before it stays",
        )
        self._pending.append(self._executor.submit(self._tell, turn.decline, refused))

    def submit_segments(
        self, parts: Mapping[str, Sequence[Segment]], incarnation: IncarnationNumber
    ) -> None:
        """Store segments beforehand; what fails is tried again by the next save."""
        self._pending.append(self._executor.submit(self._store, parts, incarnation))

    def reap(self) -> None:
        """Take finished jobs off the list; what they did not expect is raised here."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no job is pending; False if some still are after ``timeout_s``."""
        deadline_s = self.clock.monotonic_s() + timeout_s
        while self._pending:
            job = self._pending[0]
            try:
                job.exception(timeout=max(0.0, deadline_s - self.clock.monotonic_s()))
            except TimeoutError:
                return False
            self.reap()
        return True

    def close(self, deadline_s: float | None = None) -> None:
        """Wait for pending jobs, end the thread and the process, give the arenas back.

        Args:
            deadline_s: On the clock's monotonic scale; ``must_timeout_s`` from now by default.

        Raises:
            StorageError: A job did not end in time; what it writes is given up.
            Exception: What a job did not expect; raised when everything is given back.
        """
        unexpected: list[Exception] = []
        drained = False
        try:
            drained = self._drain(unexpected, deadline_s)
        finally:
            if not drained:
                self._images.give_up()
            if self.executor is None:
                self._executor.shutdown(wait=drained, cancel_futures=True)
        if drained:
            self._images.close()
            for arena in self.arenas:
                arena.close()
        if unexpected:
            raise unexpected[0]
        if not drained:
            raise self.too_slow("checkpoints", deadline_s=deadline_s)

    def _drain(self, unexpected: list[Exception], deadline_s: float | None) -> bool:
        """Wait for all pending jobs; False if some have not ended in time."""
        if deadline_s is None:
            deadline_s = self.clock.monotonic_s() + self.options.must_timeout_s
        while True:
            try:
                return self.wait(deadline_s - self.clock.monotonic_s())
            except Exception as error:  # noqa: BLE001 - one job's failure must not lose the next
                unexpected.append(error)

    def too_slow(self, where: str, *, deadline_s: float | None = None) -> StorageError:
        """The error of a save that is still going on when it should have ended."""
        limit, option = f"within {self.options.must_timeout_s:g} s", "must_timeout_s"
        if deadline_s is not None:
            limit, option = "before the grace period did", "grace_s"
        return StorageError(
            f"a save did not end {limit}",
            where=where,
            rule="nobody waits for a disk for ever",
            way_out=f"look at the disk, or raise {option}",
        )

    @property
    def collector(self) -> Collector:
        """Deletes what the ledger lists as collected."""
        return Collector(
            self.storage,
            self.ledger,
            self.segments,
            self.faults,
            self.events,
            timeout_s=self.options.commit_timeout_s,
        )

    def _save(self, snapshot: Snapshot, turn: Turn) -> SaveError | None:
        """One save, on the executor; returns what kept it from being committed."""
        name = snapshot.manifest.name
        started_s = self.clock.monotonic_s()
        try:
            manifest, digest = self._write(snapshot, turn)
            self.verified.add(name.directory)
            self._commit(manifest, digest, started_s)
        except (PerdureError, OSError) as error:
            return self.report(name, error)
        self.last_error = None
        self._point_to(name, digest)
        self._tidy(manifest)
        return None

    def _tidy(self, manifest: Manifest) -> None:
        """What follows a commit, which counts whatever happens here."""
        name = manifest.name
        try:
            self.segments.named_now(manifest.segments)
            self._retain()
            if self.tier is not None:
                self.tier.notify()
        except FencedError as error:
            self.report(name, error)
        except (PerdureError, OSError) as error:
            message = f"{name.directory} is saved, but older ones could not be collected ({error})"
            self.events("warning", {"message": message})

    def _lead(self, snapshot: Snapshot, turn: Turn) -> SaveError | None:
        """A save that other ranks share in; they learn how it ended."""
        try:
            outcome = self._save(snapshot, turn)
        except BaseException as error:
            self._tell(turn.close, error)
            raise
        self._tell(turn.close, outcome)
        return outcome

    def _follow(self, snapshot: Snapshot, turn: Turn) -> SaveError | None:
        """This rank's share of a save that another one commits."""
        with contextlib.ExitStack() as held:
            held.callback(self._free.append, snapshot.arena)

            def store() -> Manifest:
                with held:
                    return writer.write_files(
                        self.storage, snapshot, self.faults, images=self._images
                    )

            try:
                turn.share(store, snapshot.agreement)
            except (PerdureError, OSError) as error:
                return self.report(snapshot.manifest.name, error)
        self.last_error = None
        return None

    def _tell(self, tell: Callable[[Any], None], outcome: Any) -> None:
        try:
            tell(outcome)
        except PerdureError as error:
            self.events("warning", {"message": f"the other ranks were not told ({error})"})

    def _write(self, snapshot: Snapshot, turn: Turn) -> tuple[Manifest, str]:
        """Everything durable, the manifest included; what failed half-way is removed."""
        name = snapshot.manifest.name
        writing = False
        try:
            try:
                writer.require_empty(self.storage, name.directory)
                stored = self.segments.make_durable(snapshot.segments, name.incarnation)
                writing = True
                if not turn.alone:
                    self.storage.make_dirs(directory_path(name.directory))
                turn.open()
                manifest = writer.write_files(
                    self.storage, snapshot.naming(stored), self.faults, images=self._images
                )
            finally:
                self._free.append(snapshot.arena)
            manifest = turn.complete(manifest, snapshot.agreement)
            digest = writer.write_manifest(self.storage, manifest, self.faults, images=self._images)
            return manifest, digest
        except (PerdureError, OSError):
            if writing:
                self._discard(name)
            raise

    def _store(
        self, parts: Mapping[str, Sequence[Segment]], incarnation: IncarnationNumber
    ) -> SaveError | None:
        """Store segments, on the executor; what fails is tried again by the next save."""
        try:
            self.segments.make_durable(parts, incarnation)
        except (PerdureError, OSError) as error:
            self.events("warning", {"message": f"segments could not be stored yet ({error})"})
            return error
        return None

    def report(self, name: CheckpointName, error: SaveError) -> SaveError:
        """Count and say why a save was not committed."""
        self.failed += 1
        self.last_error = without_frames(error)
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
        """A hint that nothing reads back: a disk too full for it still has to be relieved."""
        pointer = {"format": 1, "directory": name.directory, "manifest_digest": digest}
        try:
            self.storage.write_atomic(directory_path(LATEST), sealed_json.encode(pointer))
        except (StorageError, OSError) as error:
            message = f"{name.directory} is saved, but {LATEST} could not be written ({error})"
            self.events("warning", {"message": message})
            return
        self.faults.reach(FaultPoint.POINTER_WRITTEN)

    def _retain(self) -> None:
        there = retention.present(self.storage, self.ledger.committed())
        if not any(record.directory in self.verified for record in there):
            return
        reasons = why_kept(
            there, self.options.rules, metrics_of=self._metrics_of, verified=self.verified
        )
        surplus = tuple(directory for directory, why in reasons.items() if not why)
        if surplus:
            self._warn_of_metric(there)
        if surplus and self.tier is not None:
            surplus = self.tier.let_go(surplus)
        if surplus:
            self.collector.collect(surplus)

    def _warn_of_metric(self, there: Sequence[Checkpointed]) -> None:
        """Say once if no checkpoint has the metric that the best are kept by."""
        best = self.options.rules.best
        if best is None or self._warned:
            return
        found = {name for record in there for name in self._metrics_of(record) or ()}
        if best.metric not in found:
            self._warned = True
            known = ", ".join(sorted(found)) or "none"
            message = f"no checkpoint has the metric {best.metric}; known here: {known}"
            self.events("warning", {"message": message})

    def _discard(self, name: CheckpointName) -> None:
        """Free what a failed save has written; it was never a checkpoint."""
        try:
            retention.remove(self.storage, name.directory)
            self._used.discard(name.directory)
        except (PerdureError, OSError) as error:
            message = f"{name.directory}: could not remove a failed save ({error})"
            self.events("warning", {"message": message})
