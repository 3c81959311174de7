"""Checking checkpoints against manifests and commits, and choosing the one to resume from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Literal

from perdure.checkpoint.files import FileEntry, FileProblem, file_problem
from perdure.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    decode_manifest,
    digest_of,
    directory_path,
)
from perdure.checkpoint.segments.store import segment_problem
from perdure.core import sealed_json
from perdure.core.errors import DamagedError, NothingToResumeError, StorageError
from perdure.core.events import EventSink
from perdure.core.ids import CheckpointName
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage

QUARANTINE = "quarantine"

SegmentCheck = Literal["every byte", "index", "nothing"]
"""How far the segments that a checkpoint names are checked."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of checking one checkpoint; ``manifest`` is None if it could not be read."""

    directory: str
    manifest: Manifest | None
    problems: tuple[FileProblem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def reason(self) -> str:
        """All problems in one clause."""
        return ", ".join(f"{problem.file}: {problem.reason}" for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A committed checkpoint that recovery has passed over, with the reason it gave."""

    path: str
    """Where it lies below the run; of one that was missing, where the reason lies."""
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to resume from, and the newer ones that could not be used."""

    name: CheckpointName
    manifest: Manifest
    skipped: tuple[tuple[str, str], ...]
    """``(directory, reason)``, newest first."""

    @property
    def directory(self) -> str:
        return self.name.directory


def check_file(storage: Storage, root: str, file: str, entry: FileEntry) -> FileProblem | None:
    """What is wrong with ``root/file``, if anything: presence, size, checksum of every byte."""
    problem = file_problem(storage, f"{root}/{file}", entry)
    return None if problem is None else replace(problem, file=file)


def verify(
    storage: Storage,
    directory: str,
    *,
    manifest_digest: str = "",
    segments: SegmentCheck = "every byte",
    executor: Executor | None = None,
) -> VerifyReport:
    """Check one checkpoint, byte by byte.

    Args:
        storage: The run's storage.
        directory: Name below ``checkpoints/``.
        manifest_digest: What the commit says the manifest's digest is; empty = not compared.
        segments: How far the segments it names are checked.
        executor: Checks several files at once; without one they are checked one after another.

    Raises:
        FutureFormatError: The manifest is intact but of a newer format.
    """
    manifest = _read_manifest(storage, directory, manifest_digest)
    if isinstance(manifest, FileProblem):
        return VerifyReport(directory, None, (manifest,))
    checks = _checks(storage, manifest, segments)
    if executor is None:
        found = [check() for check in checks]
    else:
        found = [future.result() for future in [executor.submit(check) for check in checks]]
    return VerifyReport(directory, manifest, tuple(problem for problem in found if problem))


def committed_manifest(storage: Storage, record: Checkpointed) -> Manifest:
    """The manifest of a committed checkpoint; its files are not looked at.

    Raises:
        DamagedError: It is missing, or not the one that was committed.
        StorageError: It cannot be read.
        FutureFormatError: It is intact but of a newer format.
    """
    found = _read_manifest(storage, record.directory, record.manifest_digest)
    if isinstance(found, Manifest):
        return found
    raise (StorageError if found.unreadable else DamagedError)(
        found.reason,
        where=f"{directory_path(record.directory)}/{MANIFEST}",
        rule="a committed checkpoint has the manifest that the log names",
        way_out="use another one: `perdure ckpt verify` says which are whole",
    )


def _read_manifest(storage: Storage, directory: str, digest: str) -> Manifest | FileProblem:
    path = f"{directory_path(directory)}/{MANIFEST}"
    try:
        data = storage.read(path)
        if digest and digest_of(data) != digest:
            return FileProblem(MANIFEST, "digest differs from the committed one")
        manifest = decode_manifest(data, where=path)
    except FileNotFoundError:
        return FileProblem(MANIFEST, "missing")
    except DamagedError as error:
        return FileProblem(MANIFEST, error.what)
    except StorageError as error:
        return FileProblem(MANIFEST, error.what, unreadable=True)
    if manifest.name.directory != directory:
        return FileProblem(MANIFEST, f"belongs to {manifest.name.directory}")
    if manifest.sharding_problem:
        return FileProblem(MANIFEST, manifest.sharding_problem)
    return manifest


def _checks(
    storage: Storage, manifest: Manifest, segments: SegmentCheck
) -> list[Callable[[], FileProblem | None]]:
    """One call for every file of a checkpoint."""
    root = directory_path(manifest.name.directory)
    checks: list[Callable[[], FileProblem | None]] = [
        functools.partial(check_file, storage, root, path, entry)
        for path, entry in sorted(manifest.files.items())
    ]
    if segments != "nothing":
        checks += [
            functools.partial(
                segment_problem, storage, one, component=name if segments == "index" else None
            )
            for name, stored in sorted(manifest.segments.items())
            for one in stored
        ]
    return checks


def choose(
    storage: Storage,
    committed: Sequence[Checkpointed],
    *,
    events: EventSink,
    segments: SegmentCheck = "index",
) -> Choice:
    """The newest committed checkpoint whose every byte is right.

    Of segments, which may be many gigabytes, presence, size and index are checked; their rows are
    checked before they are first used, and a segment that is found damaged then leaves its place,
    so that the next choice passes over whatever names it.

    Damaged ones that are passed over are reported and moved to ``quarantine/``, a reason beside
    them. Nothing is deleted; nothing is moved if no good one is found, nor what could merely not be
    read. Only the process that has claimed the run may call this.

    Args:
        storage: The run's storage.
        committed: Commits of the kept lineage, oldest first.
        events: Receives ``checkpoint_damaged``.
        segments: How far segments are checked; ``"nothing"`` if they will not be loaded.

    Raises:
        NothingToResumeError: Nothing was ever committed.
        DamagedError: Something was committed and none of it can be used.
        StorageError: The same, and some of it could merely not be read.
        FutureFormatError: The newest one is intact but of a newer format.
    """
    if not committed:
        raise NothingToResumeError(
            "no checkpoint was ever committed",
            where=CHECKPOINTS,
            rule="a checkpoint counts when the log lists it",
            way_out="start a new run",
        )
    damaged: list[VerifyReport] = []
    for record in reversed(committed):
        report = verify(
            storage,
            record.directory,
            manifest_digest=record.manifest_digest,
            segments=segments,
        )
        if report.ok and report.manifest is not None:
            for passed_over in damaged:
                quarantine(storage, passed_over)
            skipped = tuple((bad.directory, bad.reason) for bad in damaged)
            return Choice(report.manifest.name, report.manifest, skipped)
        damaged.append(report)
        for problem in report.problems:
            fields = {"file": problem.file, "reason": problem.reason}
            events("checkpoint_damaged", {"name": record.directory, **fields})
    raise _none_usable(damaged)


def _none_usable(damaged: Sequence[VerifyReport]) -> DamagedError | StorageError:
    what = f"none of {len(damaged)} committed checkpoints can be used"
    where = ", ".join(f"{bad.directory} ({bad.reason})" for bad in damaged)
    rule = "a run whose checkpoints are damaged is never started afresh silently"
    if any(problem.unreadable for report in damaged for problem in report.problems):
        way_out = "check the disk, then resume; nothing was moved or deleted"
        return StorageError(what, where=where, rule=rule, way_out=way_out)
    way_out = "put one of them back from a copy, or start a new run in another directory"
    return DamagedError(what, where=where, rule=rule, way_out=way_out)


def quarantine(storage: Storage, report: VerifyReport) -> None:
    """Move a damaged checkpoint out of the way, the reason first.

    A missing one leaves a reason, unless there is one: it was moved before, or missed before.
    """
    if any(problem.unreadable for problem in report.problems):
        return
    source = directory_path(report.directory)
    present = storage.exists(source)
    if not present and storage.exists(_reason_path(report.directory)):
        return
    target, copies = report.directory, 1
    while storage.list(f"{QUARANTINE}/{target}"):
        copies += 1
        target = f"{report.directory}.{copies}"
    reason = {
        "format": 1,
        "directory": report.directory,
        "problems": {problem.file: problem.reason for problem in report.problems},
    }
    storage.make_dirs(QUARANTINE)
    storage.write_atomic(_reason_path(target), sealed_json.encode(reason))
    if present:
        storage.rename(source, f"{QUARANTINE}/{target}")
        storage.sync_dir(QUARANTINE)
        storage.sync_dir(CHECKPOINTS)


def _reason_path(target: str) -> str:
    return f"{QUARANTINE}/{target}.reason.json"


def quarantined(storage: Storage, directory: str) -> Quarantined | None:
    """What recovery did with a checkpoint that is no longer in its place; None if nothing."""
    if storage.exists(directory_path(directory)):
        return None
    known = set(storage.list(QUARANTINE))
    copies = (directory if n == 1 else f"{directory}.{n}" for n in range(1, len(known) + 1))
    name = next((n for n in reversed([*copies]) if f"{n}.reason.json" in known), None)
    if name is None:
        return None
    path = _reason_path(name)
    try:
        value = sealed_json.decode(
            storage.read(path), where=path, newest_format=1, fields=("problems",)
        )
        reason = ", ".join(f"{file}: {problem}" for file, problem in value["problems"].items())
    except (DamagedError, FileNotFoundError) as error:
        reason = f"its reason cannot be read ({error})"
    return Quarantined(f"{QUARANTINE}/{name}" if name in known else path, reason)
