"""A storage that fails: planned or seeded faults around any other storage, counted.

Where a real disk leaves it open whether a failed call took effect, so does this one: a failed
append leaves a part of its bytes, a failed sync inside an atomic write or an exclusive creation is
reported although the file is there, and after a failed sync of an open file the bytes are never
made durable, whatever later syncs say (the kernel marks the pages clean).
"""

from __future__ import annotations

import enum
import errno
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from perdure.core.clock import Clock, ManualClock
from perdure.core.keyed_random import generator
from perdure.core.storage_api import AppendFile, RunLock, Storage
from perdure.storage.refusals import abandoned, refusal


class StorageFaultKind(enum.Enum):
    """How an operation fails."""

    TORN_WRITE = "torn_write"
    """Only a part is written, then EIO."""
    FLIP_WRITE = "flip_write"
    """One bit of what is written is flipped; no error."""
    FLIP_READ = "flip_read"
    """One bit of what is read is flipped; the file is unharmed."""
    NO_SPACE = "no_space"
    """ENOSPC; an append may have written a part."""
    EIO_WRITE = "eio_write"
    EIO_SYNC = "eio_sync"
    EIO_READ = "eio_read"
    SLOW = "slow"
    """The operation takes ``slow_s`` seconds of the clock."""
    VANISH = "vanish"
    """The file is gone when it is read or sized."""


class _Touch(enum.Enum):
    """What an operation does; decides which faults can strike it."""

    WRITE = enum.auto()
    NAME = enum.auto()
    SYNC = enum.auto()
    READ = enum.auto()
    STAT = enum.auto()
    SEARCH = enum.auto()


_STRIKES = MappingProxyType(
    {
        StorageFaultKind.TORN_WRITE: frozenset({_Touch.WRITE}),
        StorageFaultKind.FLIP_WRITE: frozenset({_Touch.WRITE}),
        StorageFaultKind.FLIP_READ: frozenset({_Touch.READ}),
        StorageFaultKind.NO_SPACE: frozenset({_Touch.WRITE, _Touch.NAME}),
        StorageFaultKind.EIO_WRITE: frozenset({_Touch.WRITE, _Touch.NAME}),
        StorageFaultKind.EIO_SYNC: frozenset({_Touch.SYNC}),
        StorageFaultKind.EIO_READ: frozenset({_Touch.READ, _Touch.STAT, _Touch.SEARCH}),
        StorageFaultKind.SLOW: frozenset(_Touch),
        StorageFaultKind.VANISH: frozenset({_Touch.READ, _Touch.STAT}),
    }
)


@dataclass(frozen=True, slots=True)
class StorageFault:
    """Fail the ``hit``-th operation (from 1) that ``kind`` can strike.

    ``path_contains`` counts only operations on paths that contain it.
    """

    kind: StorageFaultKind
    hit: int = 1
    path_contains: str = ""


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """A fault at each operation with probability ``rate``, of one of the ``kinds`` that fit it."""

    rate: float
    kinds: tuple[StorageFaultKind, ...] = tuple(StorageFaultKind)


class FaultyStorage:
    """A :class:`~perdure.core.storage_api.Storage` that strikes at planned or seeded operations.

    ``fired`` counts the faults that struck, by kind. Thread-safe where the inner storage is.

    Args:
        inner: The storage that does the work.
        plan: Faults at counted operations.
        seed: Seeds random faults, flipped bits and torn lengths.
        random: Faults at operations that the plan leaves alone.
        clock: Slept on by slow operations.
        slow_s: How long a slow operation takes.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        plan: Sequence[StorageFault] = (),
        seed: int = 0,
        random: RandomFaults | None = None,
        clock: Clock | None = None,
        slow_s: float = 5.0,
    ) -> None:
        self.fired: Counter[StorageFaultKind] = Counter()
        self._inner = inner
        self._plan = tuple(plan)
        self._hits = [0] * len(self._plan)
        self._rng = generator(seed, "storage_faults")
        self._random = RandomFaults(0.0) if random is None else random
        self._clock = ManualClock() if clock is None else clock
        self._slow_s = slow_s
        self._mutex = threading.Lock()
        self._never_durable: set[str] = set()

    def make_dirs(self, path: str) -> None:
        self._strike("create directory", path, _Touch.NAME)
        self._inner.make_dirs(path)

    def create_append(self, path: str) -> FaultyAppendFile:
        kind = self._strike("create", path, _Touch.NAME, _Touch.SYNC)
        file = self._inner.create_append(path)
        if kind is StorageFaultKind.EIO_SYNC:
            file.close()
            raise _eio("sync directory", path)
        self._forget_pages(path)
        return FaultyAppendFile(self, file)

    def write_atomic(self, path: str, data: bytes) -> None:
        kind = self._strike_whole_write("write", path)
        self._inner.write_atomic(path, self._flipped(data, kind))
        self._forget_pages(path)
        self._report_sync(path, kind)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        kind = self._strike_whole_write("create", path)
        created = self._inner.create_exclusive(path, self._flipped(data, kind))
        self._report_sync(path, kind)
        return created

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        kind = self._strike("read", path, _Touch.READ)
        return self._flipped(self._inner.read(path, offset, length), kind)

    def map(self, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        kind = self._strike("map", path, _Touch.READ)
        mapped = self._inner.map(path)
        if kind is not StorageFaultKind.FLIP_READ:
            return mapped
        return np.frombuffer(self._flipped(mapped.tobytes(), kind), np.uint8)

    def size(self, path: str) -> int:
        self._strike("stat", path, _Touch.STAT)
        return self._inner.size(path)

    def exists(self, path: str) -> bool:
        self._strike("stat", path, _Touch.SEARCH)
        return self._inner.exists(path)

    def list(self, path: str) -> list[str]:
        self._strike("list", path, _Touch.SEARCH)
        return self._inner.list(path)

    def rename(self, source: str, target: str) -> None:
        self._strike("rename", source, _Touch.NAME)
        self._inner.rename(source, target)
        with self._mutex:
            if source in self._never_durable:
                self._never_durable.remove(source)
                self._never_durable.add(target)

    def remove(self, path: str) -> None:
        self._strike("remove", path, _Touch.NAME)
        self._inner.remove(path)
        self._forget_pages(path)

    def collect_temporaries(self, path: str) -> int:
        self._strike("remove", path, _Touch.NAME)
        return self._inner.collect_temporaries(path)

    def sync_file(self, path: str) -> None:
        if self._strike("sync", path, _Touch.SYNC) is StorageFaultKind.EIO_SYNC:
            self.lose_pages(path)
            raise _eio("sync", path)
        if not self.lost_pages(path):
            self._inner.sync_file(path)

    def sync_dir(self, path: str) -> None:
        if self._strike("sync directory", path, _Touch.SYNC) is StorageFaultKind.EIO_SYNC:
            raise _eio("sync directory", path)
        self._inner.sync_dir(path)

    def lock(self, path: str) -> RunLock | None:
        return self._inner.lock(path)

    def strike_append(self, file: AppendFile, data: bytes) -> int:
        """Append through the faults; a failing append leaves a part of its bytes."""
        kind = self._strike("append", file.path, _Touch.WRITE)
        if kind in {StorageFaultKind.TORN_WRITE, StorageFaultKind.NO_SPACE}:
            file.append([data[: self._draw(len(data))]])
            number = errno.ENOSPC if kind is StorageFaultKind.NO_SPACE else errno.EIO
            raise refusal("append", where=file.path, error=OSError(number, ""))
        return file.append([self._flipped(data, kind)])

    def strike_sync(self, file: AppendFile) -> None:
        """Sync through the faults."""
        if self._strike("sync", file.path, _Touch.SYNC) is StorageFaultKind.EIO_SYNC:
            self.lose_pages(file.path)
            raise _eio("sync", file.path)
        file.sync()

    def lose_pages(self, path: str) -> None:
        """From now on no sync makes the file's unsynced bytes durable."""
        with self._mutex:
            self._never_durable.add(path)

    def lost_pages(self, path: str) -> bool:
        """Whether a sync of the file failed before."""
        with self._mutex:
            return path in self._never_durable

    def _forget_pages(self, path: str) -> None:
        """The path leads to a new file or to none."""
        with self._mutex:
            self._never_durable.discard(path)

    def _strike_whole_write(self, action: str, path: str) -> StorageFaultKind | None:
        kind = self._strike(action, path, _Touch.WRITE, _Touch.SYNC)
        if kind in {StorageFaultKind.TORN_WRITE, StorageFaultKind.NO_SPACE}:
            number = errno.ENOSPC if kind is StorageFaultKind.NO_SPACE else errno.EIO
            raise refusal(action, where=path, error=OSError(number, ""))
        return kind

    def _strike(self, action: str, path: str, *touches: _Touch) -> StorageFaultKind | None:
        """Draw a fault; carry it out here unless the caller has to shape the operation itself."""
        kind = self._due(path, frozenset(touches))
        if kind is StorageFaultKind.SLOW:
            self._clock.sleep(self._slow_s)
        elif kind in {StorageFaultKind.EIO_WRITE, StorageFaultKind.EIO_READ}:
            raise _eio(action, path)
        elif kind is StorageFaultKind.NO_SPACE and _Touch.WRITE not in touches:
            raise refusal(action, where=path, error=OSError(errno.ENOSPC, ""))
        elif kind is StorageFaultKind.VANISH:
            self._inner.remove(path)
        return kind

    def _due(self, path: str, touches: frozenset[_Touch]) -> StorageFaultKind | None:
        with self._mutex:
            due: list[StorageFaultKind] = []
            for index, fault in enumerate(self._plan):
                if fault.path_contains in path and _STRIKES[fault.kind] & touches:
                    self._hits[index] += 1
                    if self._hits[index] == fault.hit:
                        due.append(fault.kind)
            if not due and self._rng.random() < self._random.rate:
                able = [kind for kind in self._random.kinds if _STRIKES[kind] & touches]
                due = [able[int(self._rng.integers(len(able)))]] if able else []
            if not due:
                return None
            self.fired[due[0]] += 1
            return due[0]

    def _report_sync(self, path: str, kind: StorageFaultKind | None) -> None:
        if kind is StorageFaultKind.EIO_SYNC:
            raise _eio("sync directory", path)

    def _flipped(self, data: bytes, kind: StorageFaultKind | None) -> bytes:
        flips = {StorageFaultKind.FLIP_WRITE, StorageFaultKind.FLIP_READ}
        if kind not in flips or not data:
            return data
        bit = self._draw(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)

    def _draw(self, below: int) -> int:
        with self._mutex:
            return int(self._rng.integers(below)) if below else 0


class FaultyAppendFile:
    """An open file of a :class:`FaultyStorage`."""

    def __init__(self, storage: FaultyStorage, inner: AppendFile) -> None:
        self._storage = storage
        self._inner = inner
        self._size = 0
        self._failed = False

    @property
    def path(self) -> str:
        return self._inner.path

    @property
    def size(self) -> int:
        return self._size

    def append(self, pieces: Iterable[bytes | memoryview]) -> int:
        self._check()
        self._failed = True
        offset = self._storage.strike_append(self._inner, b"".join(pieces))
        self._failed = False
        self._size = self._inner.size
        return offset

    def sync(self) -> None:
        self._check()
        self._failed = True
        self._storage.strike_sync(self._inner)
        self._failed = False

    def close(self) -> None:
        self._inner.close()

    def _check(self) -> None:
        if self._failed:
            raise abandoned(self.path)


def _eio(action: str, path: str) -> Exception:
    return refusal(action, where=path, error=OSError(errno.EIO, ""))
