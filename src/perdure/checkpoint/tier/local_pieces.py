"""Reading the pieces of local files that are to be shipped."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from perdure.checkpoint.tier.pieces import Piece
from perdure.core.storage_api import Storage
from perdure.storage import PosixStorage, bulk
from perdure.storage.refusals import refusal

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

Watch = Callable[[memoryview], None]
"""Is shown what was read as soon as it is, while a cache still has it."""

ReadPiece = Callable[[Piece, Watch], memoryview]
"""Its bytes, fewer if the file ends before; good until ``ahead`` further pieces were read."""


class LocalPieces:
    """Pieces of checkpoints' files; one thread at a time.

    A checkpoint's files were written past the page cache. On a disk of Linux they are read past it
    too, into buffers that are used again: through the cache, a page at a time, reading would cost
    more CPU than sending. Elsewhere they are mapped.

    Args:
        storage: Where the files are.
        piece_bytes: Longest piece.
        ahead: How many pieces are in use at once; there are as many buffers, which stay.
    """

    def __init__(self, storage: Storage, *, piece_bytes: int, ahead: int) -> None:
        self._storage = storage
        self._disk = storage if isinstance(storage, PosixStorage) else None
        if sys.platform != "linux" or piece_bytes % bulk.ALIGNMENT:
            self._disk = None
        self._slots = [_Slot() for _ in range(ahead)]
        self._next = 0

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[ReadPiece]:
        """Raises ``FileNotFoundError`` or ``StorageError``, also from the function it gives."""
        if self._disk is None:
            data = self._storage.map(path).data
            yield lambda piece, watch: _watched(data[piece.start : piece.end], watch)
            return
        disk = self._disk
        with contextlib.ExitStack() as held:
            with _refusing(path):
                opened = bulk.open_past_cache(disk.full(path), forget=False)
                descriptor = held.enter_context(opened)

            def read(piece: Piece, watch: Watch) -> memoryview:
                with _refusing(path):
                    return self._read(descriptor, piece, watch)

            yield read

    def _read(self, descriptor: int, piece: Piece, watch: Watch) -> memoryview:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        room = slot.room(piece.bytes)
        filled = 0
        while filled < piece.bytes:
            part = room[filled : filled + bulk.CHUNK_BYTES]
            got = bulk.read_piece(descriptor, part, piece.start + filled, piece.end)
            watch(got)
            filled += got.nbytes
            if got.nbytes < part.nbytes:
                break
        return slot.lend(min(filled, piece.bytes))


def _watched(data: memoryview, watch: Watch) -> memoryview:
    watch(data)
    return data


class _Slot:
    """A buffer that is lent, and used again once nobody holds what was lent."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)
        self._lent: weakref.ref[Bytes] = weakref.ref(self._buffer[:0])

    def room(self, size: int) -> memoryview:
        # A request that was given up may still be sending from it.
        if self._lent() is not None or self._buffer.nbytes < size:
            self._buffer = np.frombuffer(bulk.huge_pages(bulk.aligned(size)), np.uint8)
        return self._buffer[: bulk.aligned(size)].data

    def lend(self, size: int) -> memoryview:
        lent = self._buffer[:size]
        # Whoever holds a view of it, or a view of that, keeps this one object alive.
        self._lent = weakref.ref(lent)
        return lent.data


@contextlib.contextmanager
def _refusing(path: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refusal("read", where=path, error=error) from error
