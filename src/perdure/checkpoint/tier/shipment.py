"""What one incarnation ships, round by round: the log and the small files, then a checkpoint.

Order, each step only after the one before is stored: pieces → read back → manifest → log up to and
beyond the commit → pointer. What leaves is named in the pointer first and deleted afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from perdure.checkpoint.keep import MetricsOf, why_kept
from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.manifest import MANIFEST, Manifest, directory_path
from perdure.checkpoint.retention import KnownMetrics
from perdure.checkpoint.tier.head import Head, Pointer, RemoteCheckpoint, RemoteFile
from perdure.checkpoint.tier.leaving import Leaving
from perdure.checkpoint.tier.local_pieces import LocalPieces
from perdure.checkpoint.tier.log_files import LOG_DIR, log_cut, ship_log, unshipped
from perdure.checkpoint.tier.objects import RetryingObjects
from perdure.checkpoint.tier.options import TierContext
from perdure.checkpoint.tier.pieces import segments_of
from perdure.checkpoint.tier.pins import Pins
from perdure.checkpoint.tier.run_files import claim_of, claims, run_id_of, seals, ship_files
from perdure.checkpoint.tier.upload import Upload, read_committed
from perdure.core.errors import DamagedError
from perdure.core.faults import FaultPoint
from perdure.core.ids import IncarnationNumber
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage


@dataclass(frozen=True, slots=True)
class _State:
    """What the run's directory holds beyond checkpoints, stored and not yet pointed to."""

    wall_s: float
    files: Mapping[str, RemoteFile]
    log: Mapping[str, int]

    def into(self, head: Head) -> Head:
        names = {*head.log, *self.log}
        log = {name: max(head.log.get(name, 0), self.log.get(name, 0)) for name in sorted(names)}
        return replace(
            head, files={**head.files, **self.files}, log=log, shipped_wall_s=self.wall_s
        )


@dataclass(slots=True)
class Shipment:
    """Ships one run under one claim. Everything but :attr:`pins` belongs to one thread.

    Attributes:
        ledger: Says what is committed; a checkpoint that is not is never shipped.
        executor: Runs requests.
        between: Called between the pieces of a checkpoint; may raise to end the upload.
        passed_over: Checkpoints that cannot be shipped: gone or damaged here.
    """

    storage: Storage
    objects: RetryingObjects
    ledger: CommitLedger = field(kw_only=True)
    incarnation: IncarnationNumber = field(kw_only=True)
    context: TierContext = field(kw_only=True)
    executor: Executor = field(kw_only=True)
    between: Callable[[], None] = field(kw_only=True, default=lambda: None)

    pins: Pins = field(init=False)
    passed_over: set[str] = field(default_factory=set[str], init=False)
    _pointer: Pointer = field(init=False)
    _loaded: bool = field(default=False, init=False)
    _leaving: Leaving = field(init=False)
    _local: LocalPieces = field(init=False)
    _metrics_of: MetricsOf = field(init=False)
    _trouble: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.pins = Pins(self.storage)
        self._metrics_of = KnownMetrics(self.storage, self.ledger)
        self._pointer = Pointer(
            self.objects,
            run_id=run_id_of(self.storage),
            incarnation=self.incarnation,
            claim=claim_of(self.storage, self.incarnation),
            clock=self.context.clock,
            faults=self.context.faults,
        )
        self._leaving = Leaving(self.objects, self._pointer)
        options = self.context.options
        self._local = LocalPieces(
            self.storage, piece_bytes=options.piece_bytes, ahead=options.parallel
        )

    @property
    def head(self) -> Head:
        """The pointer as last seen."""
        return self._pointer.head

    def ship_log(self) -> None:
        """Ship the log as it is now, and the small files.

        Put off while the log gives up the checkpoint that is pointed to: the two move together.

        Raises:
            FencedError: The run was resumed elsewhere.
            StorageError, DamagedError: The store, or the local disk, refused.
        """
        self._load()
        target = self.head.target
        if target is not None and target.directory not in self._committed_names():
            return
        state = self._store_state()
        if self._is_new(state):
            before = sum(self.head.log.values())
            self._pointer.swap(state.into)
            self.context.events("log_shipped", {"bytes": sum(self.head.log.values()) - before})
            self._note()
        else:
            self._pointer.head = replace(self.head, shipped_wall_s=state.wall_s)

    def ship_checkpoint(self) -> bool:
        """Ship the newest committed checkpoint, or the one that was begun; False if none is due.

        Raises:
            FencedError: The run was resumed elsewhere.
            StorageError, DamagedError: The store, or the local disk, refused. It is begun again
                by the next call, unless it is damaged here.
        """
        self._load()
        record = self._next()
        if record is None or not self.pins.begin(record.directory):
            return False
        started_s = self.context.clock.monotonic_s()
        try:
            manifest, cut = self._store(record)
            pointed = self._point_to(record, manifest, cut)
        except (FileNotFoundError, DamagedError):
            self.passed_over.add(record.directory)
            raise
        finally:
            self.pins.end()
        if pointed:
            seconds = self.context.clock.monotonic_s() - started_s
            fields = {"name": record.directory, "bytes": manifest.bytes, "seconds": seconds}
            self.context.events("checkpoint_shipped", {"step": record.step, **fields})
        self.drop()
        return True

    def drop(self) -> None:
        """Delete what the pointer lists as dropped.

        While a manifest is missing that the pointer names, segments that it may name stay, and so
        does the list of those whose segments they are.

        Raises:
            FencedError: The run was resumed elsewhere.
            StorageError: The store refused; the list stays.
        """
        self._load()
        gone: set[str] = set()
        for name in self.head.dropped:
            if self._leaving.delete(name):
                gone.add(name)
            self.context.faults.reach(FaultPoint.REMOTE_DROPPED)
        if gone:
            self._pointer.swap(
                lambda head: replace(
                    head, dropped=tuple(name for name in head.dropped if name not in gone)
                )
            )

    def behind(self) -> tuple[int, int]:
        """Committed checkpoints newer than the one pointed to, and log bytes not shipped."""
        cut = log_cut(self.storage, upto=self.incarnation)
        return len(self._newer()), unshipped(cut, self.head.log)

    def segments(self) -> int:
        """Number of files of the log; it rises when one is finished and the next begun."""
        return len(self.storage.list(LOG_DIR))

    def _load(self) -> None:
        if self._loaded:
            return
        self._pointer.load()
        if self.head.incarnation != self.incarnation or self.head.sequence == 0:
            # Before anything else: an incarnation that was claimed twice ends here.
            # With the configuration, or a run that dies now could not be resumed elsewhere.
            paths = claims(self.storage, self.incarnation)
            files = self._store_files([*paths, *self.context.options.changing])
            self._pointer.swap(lambda head: replace(head, files={**head.files, **files}))
        self.pins.pin(self._pinned(self.head), notes=self._notes())
        self._loaded = True

    def _store_files(self, paths: list[str]) -> dict[str, RemoteFile]:
        return ship_files(self.storage, self.objects, self.head.files, paths)

    def _store_state(self) -> _State:
        """The log and the small files. The cut comes first: files that it needs are older."""
        wall_s = self.context.clock.wall_s()
        cut = log_cut(self.storage, upto=self.incarnation)
        paths = claims(self.storage, self.incarnation) + seals(self.storage, self.incarnation)
        files = self._store_files([*paths, *self.context.options.changing])
        log = ship_log(
            self.storage,
            self.objects,
            cut,
            self.head.log,
            part_bytes=self.context.options.piece_bytes,
            faults=self.context.faults,
        )
        return _State(wall_s, files, log)

    def _is_new(self, state: _State) -> bool:
        head = self.head
        return head.sequence == 0 or state.log != head.log or state.files != head.files

    def _store(self, record: Checkpointed) -> tuple[Manifest, dict[str, int]]:
        """Store what is missing of it; the segments that were there, and how they are cut."""
        directory = record.directory
        self.pins.pin({*self._pinned(self.head), directory}, notes=self._notes())
        manifest, data = read_committed(
            self.storage, directory, manifest_digest=record.manifest_digest
        )
        there = self._leaving.piece_bytes()
        segments = set(segments_of(manifest))
        shared = {path: size for path, size in there.items() if path in segments}
        if self.head.uploading != directory:
            self._pointer.swap(lambda head: _begun(head, directory, segments, shared={*shared}))
        upload = Upload(
            self.storage,
            self._local,
            self.objects,
            self.context.options,
            self.executor,
            self.context.faults,
            self.between,
        )
        upload.run(manifest, data, shared=shared)
        return manifest, shared

    def _point_to(self, record: Checkpointed, manifest: Manifest, cut: Mapping[str, int]) -> bool:
        """Name it in the pointer, unless a process beside this one has given it up meanwhile."""
        piece_bytes = self.context.options.piece_bytes
        committed = self._committed_names()
        new = RemoteCheckpoint(
            directory=record.directory,
            step=record.step,
            manifest_digest=record.manifest_digest,
            bytes=manifest.bytes + manifest.segment_bytes,
            piece_bytes=piece_bytes,
            segment_piece_bytes={path: size for path, size in cut.items() if size != piece_bytes},
        )
        state = self._store_state()

        def change(head: Head) -> Head:
            if new.directory in head.dropped:
                return state.into(head)
            older = [
                one
                for one in head.checkpoints
                if one.directory in committed and one.directory != new.directory
            ]
            kept = self._stay((*older, new))
            names = {one.directory for one in kept}
            ours = head.uploading == new.directory
            left = [one.directory for one in head.checkpoints if one.directory not in names]
            return replace(
                state.into(head),
                checkpoints=kept,
                # A push beside this process may be storing the next one by now.
                uploading="" if ours else head.uploading,
                uploading_segments=() if ours else head.uploading_segments,
                dropped=(*head.dropped, *(name for name in left if name not in head.dropped)),
            )

        self._pointer.swap(change)
        self._note()
        return new.directory not in self.head.dropped

    def _stay(self, checkpoints: tuple[RemoteCheckpoint, ...]) -> tuple[RemoteCheckpoint, ...]:
        """Those that the rules keep, of committed ones; they are all on the local disk too."""
        names = {one.directory for one in checkpoints}
        records = [one for one in self.ledger.committed() if one.directory in names]
        why = why_kept(records, self.context.options.rules, metrics_of=self._metrics_of)
        return tuple(one for one in checkpoints if why.get(one.directory))

    def _next(self) -> Checkpointed | None:
        """The checkpoint to ship now: what was begun goes on, else the newest that is here."""
        candidates = [
            record
            for record in self._newer()
            if record.directory not in {*self.passed_over, *self.head.dropped}
            and self.storage.exists(f"{directory_path(record.directory)}/{MANIFEST}")
        ]
        begun = [record for record in candidates if record.directory == self.head.uploading]
        return [*candidates, *begun][-1] if candidates else None

    def _newer(self) -> list[Checkpointed]:
        """Committed after the checkpoint that is pointed to, oldest first."""
        committed = list(self.ledger.committed())
        target = self.head.target
        names = [record.directory for record in committed]
        if target is None or target.directory not in names:
            return committed
        return committed[names.index(target.directory) + 1 :]

    def _committed_names(self) -> set[str]:
        return {record.directory for record in self.ledger.committed()}

    def _pinned(self, head: Head) -> set[str]:
        """What is pointed to, and what was begun: its upload goes on."""
        return {one.directory for one in head.checkpoints} | ({head.uploading} - {""})

    def _note(self) -> None:
        self.pins.pin(self._pinned(self.head), notes=self._notes())

    def note_trouble(self, what: str) -> None:
        """Leave word in the run's directory of why shipping fails, or that it does no more."""
        if what != self._trouble:
            self._trouble = what
            self.pins.note(self._notes())

    def _notes(self) -> dict[str, object]:
        return self.head.notes(address=self.context.address, trouble=self._trouble)


def _begun(head: Head, directory: str, segments: set[str], *, shared: set[str]) -> Head:
    """A checkpoint is announced before its first piece; one that was given up is dropped."""
    given_up = [head.uploading] if head.uploading and head.uploading != directory else []
    if given_up:
        given_up += [path for path in head.uploading_segments if path not in segments]
    return replace(
        head,
        uploading=directory,
        uploading_segments=tuple(sorted(segments - shared)),
        dropped=(*head.dropped, *(name for name in given_up if name not in head.dropped)),
    )
