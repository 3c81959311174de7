"""Memory of an arena: touched beforehand, in huge pages where the kernel gives them."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from typing import Any

import numpy as np

from perdure.core.errors import StorageError
from perdure.storage.bulk_process import SharedMemory

_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 32 << 20
_keys = itertools.count(1)


class ArenaMemory:
    """Page-aligned zeros, all of them touched, so that no copy waits for a page.

    Args:
        size: Bytes; whole pages are taken.
        shared: Behind a descriptor that another process can map, where the system has such.

    Raises:
        StorageError: The system does not give so much.
    """

    def __init__(self, size: int, *, shared: bool) -> None:
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.shared: SharedMemory | None = None
        try:
            self._take(pages, shared=shared)
        except (OSError, MemoryError) as error:
            self.close()
            raise StorageError(
                f"cannot get {pages / 1e9:.3g} GB for a copy of the state ({error})",
                where="memory",
                rule="saving takes a copy of all tensors, or two",
                way_out="set arenas to 1, or give the process more memory; perdure doctor says how"
                " much it takes",
            ) from error

    def _take(self, pages: int, *, shared: bool) -> None:
        if shared and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("checkpoint-arena", os.MFD_CLOEXEC)
            self.shared = SharedMemory(next(_keys), descriptor, pages)
            self._give_back = weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, pages)
            self._map = mmap.mmap(descriptor, pages)
        else:
            self._map = mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._touch()

    @property
    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when the last view of it does."""
        if self.shared is not None:
            self._give_back()
            self.shared = None

    def _touch(self) -> None:
        for start in range(0, len(self._map), _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, len(self._map) - start)
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, start, length)
            except OSError:
                self.array[start : start + length : mmap.PAGESIZE] = 0
