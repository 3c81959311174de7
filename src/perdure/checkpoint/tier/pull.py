"""Bringing a run back from the remote tier: into an empty directory, or what is missing in its own.

Order: checkpoint → log → seals and claims → ``run.json``. Without ``run.json`` nothing can be
claimed, so an interrupted pull is never taken for a run; pulling again goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.manifest import (
    MANIFEST,
    decode_manifest,
    digest_of,
    directory_path,
)
from perdure.checkpoint.tier.download import Download, Range, Wanted
from perdure.checkpoint.tier.head import (
    HEAD,
    Head,
    RemoteCheckpoint,
    RemoteFile,
    read_head,
    separate_ways,
)
from perdure.checkpoint.tier.log_files import LOG_DIR, LogPart, chain
from perdure.checkpoint.tier.objects import ObjectStore, RemoteUnavailableError, RetryingObjects
from perdure.checkpoint.tier.options import TierContext
from perdure.checkpoint.tier.pieces import files_of, pieces_of, segments_of
from perdure.checkpoint.tier.pins import Pins
from perdure.checkpoint.tier.run_files import INCARNATION_DIR, RUN_FILE, SEAL_DIR, is_settled
from perdure.core import sealed_json
from perdure.core.errors import ConfigError, DamagedError, RunBusyError
from perdure.core.events import EventSink
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage

_STATES = 10
"""Times the pointer may be replaced under a pull before it gives up."""
PULLED_FILE = "pulled.json"
"""Says that what the log names and is not here was lost with another disk, or not fetched.

It stays until whoever claims the run finds nothing of that kind any more.
"""
LOCK_FILE = "lock"
"""Kernel lock of whoever writes the run."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull brought.

    Attributes:
        checkpoint: Directory of the newest checkpoint that is whole here now.
        skipped: ``(directory, reason)`` of those that are damaged in the remote tier.
        bytes: Bytes fetched.
        exposed_s: Age of the log when it was last complete in the remote tier.
    """

    run_id: str
    incarnation: IncarnationNumber
    checkpoint: str
    skipped: tuple[tuple[str, str], ...]
    bytes: int
    exposed_s: float


def pull(
    storage: Storage,
    objects: ObjectStore,
    *,
    context: TierContext,
    checkpoint: str | None = None,
) -> PullReport:
    """Fetch a run, or what its directory lacks, so that it can be resumed here.

    Args:
        storage: An empty directory, or the run's own that nobody holds.
        objects: The run's prefix.
        context: Time, faults, a listener, bounds.
        checkpoint: Directory of the only checkpoint to fetch; by default all that are there.

    Raises:
        NothingToResumeError: The remote tier holds no run.
        ConfigError: The directory holds another run, or there is no such checkpoint.
        RunBusyError: A live process holds the run here.
        FencedError: The run here went on without the remote tier.
        DamagedError: No checkpoint, or not the log, can be brought back whole.
        RemoteUnavailableError: The store failed too often; what was fetched stays.
    """
    options, clock = context.options, context.clock
    retrying = RetryingObjects(objects, policy=options.retry, clock=clock)
    started_s = clock.monotonic_s()
    storage.make_dirs("")
    with _held(storage), ThreadPoolExecutor(options.parallel) as executor:
        download = Download(storage, retrying, options, executor, context.faults)
        report = _pull_steady(download, context, checkpoint)
    fields = {"bytes": report.bytes, "seconds": clock.monotonic_s() - started_s}
    context.events("pulled", {"name": report.checkpoint, **fields})
    return report


def _pull_steady(download: Download, context: TierContext, checkpoint: str | None) -> PullReport:
    """Pull what one state of the pointer names; again if it was replaced and that has gone."""
    head = read_head(download.objects)
    for _ in range(_STATES):
        _check_local(download.storage, head)
        pulled = _Pull(download, head, context.events, context.address)
        try:
            return pulled.run(checkpoint, now_wall_s=context.clock.wall_s())
        except DamagedError:
            newer = read_head(download.objects)
            if newer.sequence == head.sequence:
                raise
            head = newer
    raise RemoteUnavailableError(
        f"the pointer was replaced {_STATES} times while it was followed",
        where=HEAD,
        rule="what is pulled is one state of the run",
        way_out="pull again, or stop the run that ships",
    )


@contextlib.contextmanager
def _held(storage: Storage) -> Generator[None]:
    lock = storage.lock(LOCK_FILE)
    if lock is None:
        raise RunBusyError(
            "a live process holds this run",
            where=LOCK_FILE,
            rule="files are put only into a run that nobody writes",
            way_out="stop it, or pull into another directory",
        )
    try:
        yield
    finally:
        lock.release()


def _check_local(storage: Storage, head: Head) -> None:
    """What is here already belongs to this run and has not gone its own way."""
    for path, file in sorted(head.files.items()):
        if not is_settled(path) or not storage.exists(path):
            continue
        if xxhash.xxh3_128_hexdigest(storage.read(path)) == file.checksum:
            continue
        if path == RUN_FILE:
            raise ConfigError(
                "the directory holds another run",
                where=path,
                rule="a run is pulled into an empty directory or its own",
                way_out="name another directory",
            )
        raise separate_ways("differs from the one in the remote tier", where=path)


@dataclass(frozen=True, slots=True)
class _Pull:
    download: Download
    head: Head
    events: EventSink
    address: str

    def run(self, checkpoint: str | None, *, now_wall_s: float) -> PullReport:
        head, storage = self.head, self.download.storage
        # Before any byte: nothing that the pointer names is collected here.
        names = {one.directory for one in head.checkpoints}
        Pins(storage).pin(names, notes=head.notes(address=self.address))
        found, skipped, fetched = self._checkpoint(checkpoint)
        fetched += self.download.run(self._log())
        # Also where there is no file for them: whoever claims the run writes into them.
        for folder in (INCARNATION_DIR, SEAL_DIR, LOG_DIR):
            storage.make_dirs(folder)
        last = [_small(RUN_FILE, head.files[RUN_FILE])]
        others = [_small(path, file) for path, file in head.files.items() if path != RUN_FILE]
        fetched += self.download.run([file for file in others if self._may_replace(file)])
        if not storage.exists(RUN_FILE):
            storage.write_atomic(PULLED_FILE, sealed_json.encode({"format": 1}))
        fetched += self.download.run(last)
        return PullReport(
            run_id=head.run_id,
            incarnation=head.incarnation,
            checkpoint=found,
            skipped=skipped,
            bytes=fetched,
            exposed_s=max(0.0, now_wall_s - head.shipped_wall_s),
        )

    def _checkpoint(self, only: str | None) -> tuple[str, tuple[tuple[str, str], ...], int]:
        """Fetch what the pointer names, newest first, or the one asked for; the first is told."""
        candidates = [one for one in self.head.checkpoints if only in (None, one.directory)]
        if only is not None and not candidates:
            known = ", ".join(one.directory for one in self.head.checkpoints)
            raise ConfigError(
                "is not in the remote tier",
                where=only,
                rule="what the pointer names can be pulled",
                way_out=f"it holds {known or 'none'}",
            )
        skipped: list[tuple[str, str]] = []
        found, fetched = "", 0
        for one in reversed(candidates):
            try:
                fetched += self._fetch_checkpoint(one)
                found = found or one.directory
            except DamagedError as error:
                if read_head(self.download.objects).sequence != self.head.sequence:
                    raise
                skipped.append((one.directory, str(error)))
                fields = {"file": error.where, "reason": error.what}
                self.events("checkpoint_damaged", {"name": one.directory, **fields})
        if skipped and not found:
            raise DamagedError(
                "no checkpoint of the remote tier is whole",
                where=", ".join(name for name, _ in skipped),
                rule="a run whose checkpoints are damaged is never started afresh silently",
                way_out="resume from the run's own disk, if it is there",
            )
        return found, tuple(skipped), fetched

    def _fetch_checkpoint(self, one: RemoteCheckpoint) -> int:
        root = directory_path(one.directory)
        where = f"{root}/{MANIFEST}"
        try:
            data = self.download.objects.read(where)
        except FileNotFoundError as error:
            raise _not_whole("missing in the remote tier", where=where) from error
        if digest_of(data) != one.manifest_digest:
            raise _not_whole("is not the manifest that the pointer names", where=where)
        manifest = decode_manifest(data, where=where)
        entry = FileEntry.whole(len(data), one.manifest_digest)
        files = [
            _cut(path, file, piece_bytes=one.piece_bytes_of(path))
            for path, file in (segments_of(manifest) | files_of(manifest)).items()
        ]
        fetched = self.download.run(files)
        # Last: without it there is no checkpoint.
        return fetched + self.download.run(
            [Wanted(where, entry, (Range.all_of(where, len(data)),))]
        )

    def _log(self) -> list[Wanted]:
        parts: dict[str, list[LogPart]] = {name: [] for name in self.head.log}
        for key in self.download.objects.list(LOG_DIR):
            part = LogPart.parse(key)
            if part is not None and part.file in parts:
                parts[part.file].append(part)
        return [
            _chained(name, parts[name], length) for name, length in sorted(self.head.log.items())
        ]

    def _may_replace(self, file: Wanted) -> bool:
        """A file that the run may write again is left as it is here."""
        return is_settled(file.path) or not self.download.storage.exists(file.path)


def _not_whole(what: str, *, where: str) -> DamagedError:
    return DamagedError(
        what,
        where=where,
        rule="a checkpoint that the pointer names is there, its manifest as it was committed",
        way_out="an older one is pulled instead, if there is one; or push from the run's own disk",
    )


def _cut(path: str, entry: FileEntry, *, piece_bytes: int) -> Wanted:
    pieces = pieces_of(path, entry.bytes, piece_bytes=piece_bytes)
    return Wanted(path, entry, tuple(Range.all_of(piece.key, piece.bytes) for piece in pieces))


def _small(path: str, file: RemoteFile) -> Wanted:
    entry = FileEntry.whole(file.bytes, file.checksum)
    return Wanted(path, entry, (Range.all_of(file.object, file.bytes),))


def _chained(name: str, parts: list[LogPart], length: int) -> Wanted:
    ranges: list[Range] = []
    position = 0
    for part in chain(name, parts, length):
        end = min(part.end, length)
        size = part.end - part.start
        ranges.append(Range(part.key, size, position - part.start, end - part.start, part.checksum))
        position = end
    return Wanted(f"{LOG_DIR}/{name}", FileEntry(length, length, ()), tuple(ranges))
