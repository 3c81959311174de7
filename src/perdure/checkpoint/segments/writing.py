"""Getting the file of a segment onto the disk, and checking that it is there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping

import numpy as np
import xxhash

from perdure.checkpoint.arena_memory import ArenaMemory
from perdure.checkpoint.segments.format import Array, Bytes, aligned, pieces
from perdure.core.errors import DamagedError
from perdure.core.storage_api import Storage
from perdure.storage import PosixStorage, bulk
from perdure.storage.refusals import refusal


class SegmentFiles:
    """Writes and reads back segments, past the page cache where the storage is a disk of Linux.

    It then holds memory for one segment, the largest so far. One thread at a time.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._disk = storage if isinstance(storage, PosixStorage) else None
        if sys.platform != "linux":
            self._disk = None
        self._buffer: Bytes = np.empty(0, np.uint8)

    def write(self, path: str, index: bytes, arrays: Mapping[str, Array]) -> bulk.ImageSums:
        """Create a file; its content is durable on return, its name is not.

        Returns:
            The checksums of the memory.

        Raises:
            StorageError: The storage refused; a part of the file may be there.
        """
        if self._disk is None:
            return _append(self._storage, path, index, arrays)
        size = 0
        data = self._room_for(index, arrays)
        for piece in pieces(index, arrays):
            data[size : size + piece.nbytes] = np.frombuffer(piece, np.uint8)
            size += piece.nbytes
        with _refusing("write", path):
            return bulk.write_image(str(self._disk.root / path), data.data, size)

    def check(self, path: str, size: int, sums: bulk.ImageSums) -> None:
        """Read a file back.

        Raises:
            DamagedError: It is not what was written.
            StorageError: The storage refused.
        """
        if self._storage.size(path) == size:
            if self._disk is None:
                data = self._storage.map(path).data
                if xxhash.xxh3_128_hexdigest(data) == sums.checksum:
                    return
            else:
                with _refusing("read", path):
                    if not bulk.check_image(str(self._disk.root / path), size, sums.chunks):
                        return
        raise DamagedError(
            "reads back wrong right after it was written",
            where=path,
            rule="a segment is named by a checkpoint only if it reads back as written",
            way_out="check the disk",
        )

    def _room_for(self, index: bytes, arrays: Mapping[str, Array]) -> Bytes:
        """Whole blocks of memory for the file."""
        size = len(index) + sum(aligned(array.nbytes) for array in arrays.values())
        if self._buffer.nbytes < size:
            self._buffer = np.empty(0, np.uint8)
            self._buffer = ArenaMemory(size, shared=False).array
        return self._buffer[:size]


def _append(
    storage: Storage, path: str, index: bytes, arrays: Mapping[str, Array]
) -> bulk.ImageSums:
    """Through the storage's own methods, for everything that is no disk of Linux."""
    state = xxhash.xxh3_128()
    file = storage.create_append(path)
    try:
        for part in pieces(index, arrays):
            for start in range(0, part.nbytes, bulk.CHUNK_BYTES):
                piece = part[start : start + bulk.CHUNK_BYTES]
                state.update(piece)
                file.append([piece])
        file.sync()
        return bulk.ImageSums(state.hexdigest(), ())
    finally:
        file.close()


@contextlib.contextmanager
def _refusing(action: str, path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(action, where=path, error=error) from error
