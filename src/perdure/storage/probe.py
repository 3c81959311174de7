"""Trying a directory out: does its file system do what checkpoints and the log rely on?

Nothing can prove without a loss of power that fsync keeps its word; what can be seen is whether it
answers, how fast, and on what kind of file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perdure.core.clock import Clock
from perdure.core.errors import StorageError
from perdure.storage import bulk
from perdure.storage.refusals import refusal

Grade = Literal["ok", "warning", "failed"]

MOUNTS = Path("/proc/self/mounts")
VOLATILE = frozenset({"tmpfs", "ramfs"})
"""File systems that lose everything with the power."""
REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "virtiofs", "ceph", "lustre", "glusterfs")
"""Beginnings of the names of file systems whose locks and syncs somebody else answers for."""

_SYNCS = 20
_RACERS = 4
_ROUNDS = 50
_CHILD_TIMEOUT_S = 30.0
_BLOCK = 4096
_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one check."""

    name: str
    grade: Grade
    text: str


def probe_directory(directory: Path, *, clock: Clock, write_bytes: int) -> list[Finding]:
    """Check a directory with files of its own, which are removed again.

    Args:
        directory: Where checkpoints are to go; it exists.
        clock: Measures.
        write_bytes: Size of the file that the write rate is measured with.

    Raises:
        StorageError: No folder can be made there.
    """
    folder = directory / f".tmp-doctor-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise refusal("create directory", where=str(folder), error=error) from error
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("file system", lambda: file_system(directory)),
        ("fsync", lambda: _check_sync(folder, clock)),
        ("rename", lambda: _check_rename(folder)),
        ("link", lambda: _check_link(folder)),
        ("locks", lambda: _check_locks(folder)),
        ("O_DIRECT", lambda: _check_direct(folder)),
        ("writing", lambda: _check_rate(folder, clock, write_bytes)),
    )
    try:
        return [_guarded(name, check) for name, check in checks]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (OSError, StorageError) as error:
        return Finding(name, "failed", str(error))


def file_system(directory: Path, *, mounts: Path = MOUNTS) -> Finding:
    """What kind of file system a directory lies on."""
    kind, best = "unknown", ""
    path = os.path.realpath(directory)
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, mounted, found = line.split()[:3]
            mounted = mounted.encode().decode("unicode_escape")
            inside = path == mounted or path.startswith(mounted.rstrip("/") + "/")
            if inside and len(mounted) >= len(best):
                kind, best = found, mounted
    if kind in VOLATILE:
        return Finding("file system", "warning", f"{kind}: lives in memory, lost with the power")
    if kind.startswith(REMOTE):
        text = f"{kind}: another machine or process answers for fsync and locks"
        return Finding("file system", "warning", text)
    return Finding("file system", "ok", kind)


def _check_sync(folder: Path, clock: Clock) -> Finding:
    took_ms: list[float] = []
    with _opened(folder / "sync") as descriptor:
        for _ in range(_SYNCS):
            os.write(descriptor, bytes(_BLOCK))
            started_s = clock.monotonic_s()
            os.fdatasync(descriptor)
            took_ms.append((clock.monotonic_s() - started_s) * 1e3)
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
    median_ms = statistics.median(took_ms)
    text = f"{median_ms:.2f} ms (median of {_SYNCS}), directories too"
    if median_ms < 0.02:
        return Finding("fsync", "warning", f"{text}: too fast for a disk, nothing may be written")
    return Finding("fsync", "ok", text)


def _check_rename(folder: Path) -> Finding:
    """A reader sees the whole file before or the whole file after a rename, and always one."""
    target, done = folder / "name", threading.Event()
    target.write_bytes(bytes(_BLOCK))
    torn: list[str] = []

    def read() -> None:
        while not done.is_set() and not torn:
            try:
                data = target.read_bytes()
            except FileNotFoundError:
                torn.append("the name was gone")
                return
            if len(data) != _BLOCK or len(set(data)) != 1:
                torn.append("a mixture was read")

    reader = threading.Thread(target=read, name="doctor-reader")
    reader.start()
    try:
        for number in range(_ROUNDS):
            source = folder / "name.new"
            source.write_bytes(bytes([number % 256]) * _BLOCK)
            source.rename(target)
    finally:
        done.set()
        reader.join()
    if torn:
        return Finding("rename", "failed", f"is not atomic: {torn[0]}")
    return Finding("rename", "ok", f"atomic in {_ROUNDS} tries beside a reader")


def _check_link(folder: Path) -> Finding:
    """Of several that link to one name, exactly one succeeds."""
    winners = [0] * _ROUNDS
    barrier = threading.Barrier(_RACERS)
    lock = threading.Lock()

    def race(number: int) -> None:
        source = folder / f"source-{number}"
        source.write_bytes(b"x")
        for turn in range(_ROUNDS):
            barrier.wait(_CHILD_TIMEOUT_S)
            with contextlib.suppress(FileExistsError):
                os.link(source, folder / f"target-{turn}")
                with lock:
                    winners[turn] += 1

    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            race(number)
        except (OSError, threading.BrokenBarrierError) as error:
            barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = next((error for error in errors if isinstance(error, OSError)), None)
    if refused is not None:
        return Finding("link", "failed", f"hard links are refused ({refused.strerror})")
    if set(winners) != {1}:
        return Finding("link", "failed", "of several that claim a name, not exactly one succeeds")
    return Finding("link", "ok", f"exactly one of {_RACERS} wins, in {_ROUNDS} tries")


def _check_locks(folder: Path) -> Finding:
    """A lock keeps another process out, and falls when its holder is killed."""
    path = folder / "lock"
    path.write_bytes(b"")
    holder = _start_holder(path)
    try:
        if _said(holder) != "held":
            return Finding("locks", "failed", "a free lock is refused")
        second = _start_holder(path)
        try:
            if _said(second) != "refused":
                return Finding("locks", "failed", "two processes hold one lock")
        finally:
            _end(second)
    finally:
        _end(holder)
    with _opened(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("locks", "failed", "the lock of a killed process stays")
    return Finding("locks", "ok", "keep other processes out, fall with their holder")


def _start_holder(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    watchdog = threading.Timer(_CHILD_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        return process.stdout.readline().strip()
    finally:
        watchdog.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _check_direct(folder: Path) -> Finding:
    """Whether bytes can go past the page cache."""
    path = folder / "direct"
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        with _opened(path, flags) as descriptor, mmap.mmap(-1, _BLOCK) as memory:
            os.write(descriptor, memory)
    except OSError as error:
        text = f"not there ({error.strerror}): checkpoints go through the page cache"
        return Finding("O_DIRECT", "warning", text)
    return Finding("O_DIRECT", "ok", "taken: checkpoints go past the page cache")


def _check_rate(folder: Path, clock: Clock, size: int) -> Finding:
    """Writing, syncing and reading back as a checkpoint does."""
    path = str(folder / "image")
    with mmap.mmap(-1, bulk.aligned(size)) as memory, memoryview(memory) as data:
        data[:8] = b"perdure\n"
        started_s = clock.monotonic_s()
        try:
            sums = bulk.write_image(path, data, size)
            written_s = clock.monotonic_s()
            bad = bulk.check_image(path, size, sums)
        except OSError as error:
            # Here, not outside: the error holds on to the memory that is about to be given back.
            return Finding("writing", "failed", f"{size:,} bytes: {error.strerror}")
        read_s = clock.monotonic_s()
    if bad:
        return Finding("writing", "failed", "what was written reads back wrong")
    rates = [size / 1e6 / max(1e-9, s) for s in (written_s - started_s, read_s - written_s)]
    text = f"{rates[0]:,.0f} MB/s with checksums and fsync, read back at {rates[1]:,.0f} MB/s"
    return Finding("writing", "ok", text)


@contextlib.contextmanager
def _opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Generator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
