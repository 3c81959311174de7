"""Making a run, claiming it, and fencing everyone who held it before.

The protocol and why it is safe at any interleaving: ``docs/design/fencing.md``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from perdure.core import sealed_json
from perdure.core.clock import Clock
from perdure.core.errors import DamagedError, NothingToResumeError, RunBusyError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import RunLock, Storage
from perdure.experience.scan import Extent, scan_incarnation
from perdure.experience.seals import FORMAT, SEAL_DIR, read_seal, seal_incarnation
from perdure.experience.segments import LOG_DIR, SegmentName

RUN_FILE = "run.json"
LOCK_FILE = "lock"
INCARNATION_DIR = "incarnations"
_INCARNATION_FIELDS = ("run_id", "incarnation", "host", "pid", "started_wall_s", "took_over")
_COPY = "restore it from a copy"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What ``run.json`` says."""

    run_id: str
    created_wall_s: float
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    config_digest: str = ""
    dataset_digest: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that makes a claim."""

    host: str
    pid: int

    @classmethod
    def here(cls) -> Holder:
        """The current process."""
        return cls(socket.gethostname(), os.getpid())


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write: the incarnation is the highest until somebody else claims.

    Attributes:
        parent: Newest earlier incarnation that started; 0 if there is none.
        took_over: Claimed while somebody else held the run.
        lock: Kernel lock that tells others that the run is held.
        sealed: What this claim has sealed; every byte was verified when it did.
    """

    run: RunInfo
    incarnation: IncarnationNumber
    parent: IncarnationNumber
    took_over: bool
    lock: RunLock
    sealed: Mapping[IncarnationNumber, Extent] = field(
        default_factory=dict[IncarnationNumber, Extent]
    )

    def release(self) -> None:
        """Give up the kernel lock; the claim stays the highest."""
        self.lock.release()


def create_run(storage: Storage, info: RunInfo) -> RunInfo:
    """Write ``run.json`` unless it exists; return what it says. The first of several wins."""
    for directory in (INCARNATION_DIR, SEAL_DIR, LOG_DIR):
        storage.make_dirs(directory)
    value = {
        "format": FORMAT,
        "run_id": info.run_id,
        "created_wall_s": info.created_wall_s,
        "versions": dict(info.versions),
        "config_digest": info.config_digest,
        "dataset_digest": info.dataset_digest,
    }
    storage.create_exclusive(RUN_FILE, sealed_json.encode(value))
    return read_run(storage)


def read_run(storage: Storage) -> RunInfo:
    """Read ``run.json``.

    Raises:
        NothingToResumeError: There is no run here.
        DamagedError: ``run.json`` is damaged, or missing although the run has incarnations.
    """
    try:
        data = storage.read(RUN_FILE)
    except FileNotFoundError as error:
        if storage.list(INCARNATION_DIR) or storage.list(LOG_DIR):
            raise DamagedError(
                "the file is missing",
                where=RUN_FILE,
                rule="the directory holds incarnations or a log, so it is a run",
                way_out=_COPY,
            ) from error
        raise NothingToResumeError(
            "there is no run here",
            where=RUN_FILE,
            rule="a run directory holds run.json",
            way_out="name another directory, or start a run with perdure train",
        ) from error
    value = sealed_json.decode(
        data, where=RUN_FILE, newest_format=FORMAT, fields=[f.name for f in fields(RunInfo)]
    )
    return RunInfo(
        value["run_id"],
        value["created_wall_s"],
        value["versions"],
        config_digest=value["config_digest"],
        dataset_digest=value["dataset_digest"],
    )


def claim(
    storage: Storage,
    *,
    run_id: str,
    clock: Clock,
    faults: FaultHook,
    take_over: bool = False,
    info: Holder | None = None,
) -> Claim:
    """Become the highest incarnation and settle where every earlier one ended.

    Args:
        run_id: Must be the run's.
        take_over: Go on although a live process holds the kernel lock; it is fenced.
        info: Who claims; the current process by default.

    Raises:
        RunBusyError: A live process holds the run and ``take_over`` is False.
        DamagedError: The log of an earlier incarnation is damaged, or files of the claim protocol
            are missing.
        StorageError: The storage refused.
    """
    run = read_run(storage)
    # Whoever made the run may have died before these names were durable.
    storage.sync_dir("")
    if run.run_id != run_id:
        raise DamagedError(
            f"this is run {run.run_id}",
            where=RUN_FILE,
            rule=f"run {run_id} was expected",
            way_out=_COPY,
        )
    with contextlib.ExitStack() as stack:
        lock = storage.lock(LOCK_FILE)
        if lock is not None:
            stack.callback(lock.release)
        elif not take_over:
            raise _busy(storage)
        _check_incarnations(storage, run_id)
        took_over = lock is None or _is_held_by_taker(storage)
        if took_over and not take_over:
            raise _busy(storage)
        holder = info or Holder.here()
        incarnation = _link(storage, run_id, clock, holder=holder, took_over=took_over)
        if lock is None:
            lock = storage.lock(_taker_lock(incarnation))
            assert lock is not None, "nobody else has this incarnation"
            stack.callback(lock.release)
        faults.reach(FaultPoint.CLAIM_LINKED)
        sealed = _seal_below(storage, incarnation, run_id=run_id)
        faults.reach(FaultPoint.CLAIM_SEALED)
        parent = newest_started(storage, run_id=run_id, below=incarnation)
        stack.pop_all()
    return Claim(run, incarnation, parent, took_over=took_over, lock=lock, sealed=sealed)


def is_held(storage: Storage) -> bool:
    """Whether a live process holds the run, as far as kernel locks tell."""
    if not storage.exists(LOCK_FILE):
        # Whoever claims the run makes it. Asking does not: the disk may be read-only.
        return _is_held_by_taker(storage)
    lock = storage.lock(LOCK_FILE)
    if lock is None:
        return True
    try:
        return _is_held_by_taker(storage)
    finally:
        lock.release()


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claimed an incarnation, and when."""

    host: str
    pid: int
    started_wall_s: float


def claimant(storage: Storage, incarnation: IncarnationNumber) -> Claimant:
    """Who claimed an incarnation that exists.

    Raises:
        DamagedError: Its file is damaged.
    """
    path = incarnation_path(incarnation)
    fields = ("host", "pid", "started_wall_s")
    value = sealed_json.decode(storage.read(path), where=path, newest_format=FORMAT, fields=fields)
    return Claimant(str(value["host"]), int(value["pid"]), float(value["started_wall_s"]))


def incarnation_path(incarnation: int) -> str:
    """File of an incarnation."""
    return f"{INCARNATION_DIR}/{incarnation}.json"


def is_fenced(storage: Storage, incarnation: IncarnationNumber) -> bool:
    """Whether a newer incarnation exists. Claims leave no gap, so the next number tells."""
    return storage.exists(incarnation_path(incarnation + 1))


def highest_incarnation(storage: Storage) -> IncarnationNumber:
    """The newest claim; 0 if there is none.

    Raises:
        DamagedError: A file below the highest, or of an incarnation with segments, is missing.
    """
    written = [SegmentName.parse(file) for file in storage.list(LOG_DIR)]
    names = (file.removesuffix(".json") for file in storage.list(INCARNATION_DIR))
    claimed = {int(name) for name in names if name.isdecimal()}
    highest = max(claimed, default=0)
    needed = max((name.incarnation for name in written if name is not None), default=0)
    for number in range(1, max(highest, needed) + 1):
        # A listing beside a claimant may show the newer of two names alone: ask again by name.
        if number not in claimed and not storage.exists(incarnation_path(number)):
            raise DamagedError(
                "the file is missing",
                where=incarnation_path(number),
                rule="incarnation files are never removed",
                way_out=_COPY,
            )
    return IncarnationNumber(max(highest, needed))


def newest_started(storage: Storage, *, run_id: str, below: int) -> IncarnationNumber:
    """Newest incarnation below a number that wrote ``IncarnationStarted``; 0 if there is none."""
    for number in range(below - 1, 0, -1):
        incarnation = IncarnationNumber(number)
        seal = read_seal(storage, incarnation, run_id=run_id)
        found = seal or scan_incarnation(storage, incarnation, run_id=run_id)
        # The first batch of a control stream is SegmentOpened and IncarnationStarted.
        if sum(span.records for span in found.control) > 1:
            return incarnation
    return IncarnationNumber(0)


def _check_incarnations(storage: Storage, run_id: str) -> None:
    """Every incarnation file is the one that was written under its name."""
    for number in range(1, highest_incarnation(storage) + 1):
        path = incarnation_path(number)
        value = sealed_json.decode(
            storage.read(path), where=path, newest_format=FORMAT, fields=_INCARNATION_FIELDS
        )
        if (value["run_id"], value["incarnation"]) != (run_id, number):
            raise DamagedError(
                f"is of incarnation {value['incarnation']} of run {value['run_id']}",
                where=path,
                rule=f"it must be of incarnation {number} of run {run_id}",
                way_out=_COPY,
            )
    for name in storage.list(SEAL_DIR):
        if name.removesuffix(".json").isdecimal():
            _check_sealer(storage, f"{SEAL_DIR}/{name}")


def _check_sealer(storage: Storage, path: str) -> None:
    """Whoever wrote a seal had claimed the run: its number is never used again."""
    value = sealed_json.decode(
        storage.read(path), where=path, newest_format=FORMAT, fields=("sealed_by",)
    )
    claim_file = incarnation_path(value["sealed_by"])
    if not storage.exists(claim_file):
        raise DamagedError(
            "the file is missing",
            where=claim_file,
            rule=f"the incarnation that wrote {path} has a file, which is never removed",
            way_out=_COPY,
        )


def _is_held_by_taker(storage: Storage) -> bool:
    """Whether the newest claimant lives and holds a lock of its own, having taken the run over."""
    number = highest_incarnation(storage)
    path = _taker_lock(number)
    if not storage.exists(path):
        return False
    lock = storage.lock(path)
    if lock is not None:
        lock.release()
    return lock is None


def _taker_lock(incarnation: int) -> str:
    """Lock of an incarnation that took over from a process that still held ``LOCK_FILE``."""
    return f"{LOCK_FILE}-{incarnation}"


def _link(
    storage: Storage, run_id: str, clock: Clock, *, holder: Holder, took_over: bool
) -> IncarnationNumber:
    number = highest_incarnation(storage)
    while True:
        number = IncarnationNumber(number + 1)
        value: dict[str, Any] = {
            "format": FORMAT,
            "run_id": run_id,
            "incarnation": number,
            "host": holder.host,
            "pid": holder.pid,
            "started_wall_s": clock.wall_s(),
            "took_over": took_over,
        }
        if storage.create_exclusive(incarnation_path(number), sealed_json.encode(value)):
            return number


def _seal_below(
    storage: Storage, incarnation: IncarnationNumber, *, run_id: str
) -> dict[IncarnationNumber, Extent]:
    """Seal what no claimant has sealed yet, and return that."""
    sealed: dict[IncarnationNumber, Extent] = {}
    for number in map(IncarnationNumber, range(1, incarnation)):
        if read_seal(storage, number, run_id=run_id) is None:
            extent = seal_incarnation(storage, number, run_id=run_id, sealed_by=incarnation)
            if extent is not None:
                sealed[number] = extent
    # A seal found here may be the work of a claimant that died before its name was durable.
    storage.sync_dir(SEAL_DIR)
    return sealed


def _busy(storage: Storage) -> RunBusyError:
    path = incarnation_path(highest_incarnation(storage))
    held = ""
    if storage.exists(path):
        value = sealed_json.decode(
            storage.read(path),
            where=path,
            newest_format=FORMAT,
            fields=_INCARNATION_FIELDS,
        )
        held = f" (incarnation {value['incarnation']}, process {value['pid']} on {value['host']})"
    return RunBusyError(
        f"a live process holds this run{held}",
        where=LOCK_FILE,
        rule="one process at a time writes a run",
        way_out="wait for it, stop it, or fence it with --take-over (in a script: take_over=True)",
    )
