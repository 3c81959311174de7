"""The storage contract: durable files below one root. Paths are relative, with ``/``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np


class AppendFile(Protocol):
    """A file that only grows. Not thread-safe; one owner."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes appended so far, synced or not."""
        ...

    def append(self, pieces: Iterable[bytes | memoryview]) -> int:
        """Write the pieces at the end and return the offset of the first byte.

        Raises:
            StorageError: Disk full or I/O error; part of the bytes may be in the file.
        """
        ...

    def sync(self) -> None:
        """Make everything appended so far durable.

        Raises:
            StorageError: The sync failed. What was appended since the last good sync may or may
                not be durable; the file must be abandoned (fsync is not retried).
        """
        ...

    def close(self) -> None: ...


class RunLock(Protocol):
    """A kernel lock that dies with its process."""

    def release(self) -> None: ...


class Storage(Protocol):
    """Durable files. Every method raises ``StorageError`` when the storage refuses.

    Reading, sizing, mapping, renaming or syncing what is absent raises ``FileNotFoundError``;
    creating something in an absent directory is a ``StorageError``. After a ``StorageError`` of a
    call that writes, the call may or may not have taken effect, but never in part, except for
    appends (a part of the bytes) and the removal of a tree (a part of its files).

    "Durable" means: survives the death of the process and the loss of power. A name is durable only
    after its directory was synced.
    """

    def make_dirs(self, path: str) -> None:
        """Create a directory and its parents, durably. Existing ones are fine."""
        ...

    def create_append(self, path: str) -> AppendFile:
        """Create a new file for appending; its name is durable on return.

        Raises:
            FileExistsError: The path exists.
        """
        ...

    def write_atomic(self, path: str, data: bytes) -> None:
        """Replace or create ``path`` durably: temporary file, fsync, rename, fsync directory."""
        ...

    def create_exclusive(self, path: str, data: bytes) -> bool:
        """Create ``path`` with full content, durably, or return False if it exists.

        Temporary file, fsync, ``link(2)``, fsync directory: of several callers exactly one wins
        and nobody ever sees a part of the content. When this returns False, the file that is there
        is durable with its name, so that losers may build on what the winner wrote.
        """
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes from ``offset``; fewer than ``length`` at the end of the file."""
        ...

    def map(self, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The whole file as a read-only uint8 array, memory-mapped where the storage can."""
        ...

    def size(self, path: str) -> int:
        """Bytes in the file."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; empty if the directory is absent. No temporary files."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomic rename inside the root; durable after :meth:`sync_dir` of both directories."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a directory tree; absent is fine. Durable after :meth:`sync_dir`."""
        ...

    def collect_temporaries(self, path: str) -> int:
        """Remove what atomic writes and exclusive creations left in a directory; returns how many.

        Only what belongs to processes that died: that of a live one is never touched, whoever it
        is. An absent directory has none.
        """
        ...

    def sync_file(self, path: str) -> None:
        """fsync an existing file by name (what is in the page cache reaches the disk)."""
        ...

    def sync_dir(self, path: str) -> None: ...

    def lock(self, path: str) -> RunLock | None:
        """Take an exclusive kernel lock, or return None if a live process holds it."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """A storage that can be told what will be read."""

    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to read bytes ``start`` to ``end`` of a file. A hint: nothing is waited for, and
        what cannot be read is said by whoever reads it.
        """
        ...
