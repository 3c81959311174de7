"""Getting the file of a segment onto the disk, and checking that it is there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping

import xxhash

from perdure.checkpoint.segments.format import Array, pieces
from perdure.checkpoint.segments.memory import SegmentMemory
from perdure.core.errors import DamagedError
from perdure.core.storage_api import Storage
from perdure.storage import PosixStorage, bulk
from perdure.storage.refusals import refusal

_BUFFERS = 2


class SegmentFiles:
    """Writes and reads back segments, past the page cache where the storage is a disk of Linux.

    It then holds two buffers of 8 MiB. One thread at a time.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._disk = storage if isinstance(storage, PosixStorage) else None
        if sys.platform != "linux":
            self._disk = None
        self._buffers: list[memoryview] = []

    def write(
        self, path: str, index: bytes, arrays: Mapping[str, Array], memory: SegmentMemory | None
    ) -> str:
        """Create a file; its content is durable on return, its name is not.

        Args:
            path: A file that does not exist.
            index: Its index.
            arrays: Its columns.
            memory: Where they may lie as they will in the file: then they are not copied.

        Returns:
            The checksum of the memory.

        Raises:
            StorageError: The storage refused; a part of the file may be there.
        """
        if self._disk is None:
            return _append(self._storage, path, index, arrays)
        parts = list(pieces(index, arrays))
        size = sum(part.nbytes for part in parts)
        image = None if memory is None else memory.image(index, arrays)
        data, buffers = (parts, self._room()) if image is None else (image.data, [])
        with _refusing("write", path):
            full = str(self._disk.root / path)
            return bulk.write_image(full, data, size, buffers=buffers, chunk_sums=False).checksum

    def check(self, path: str, size: int, checksum: str) -> None:
        """Read a file back.

        Raises:
            DamagedError: It is not what was written.
            StorageError: The storage refused.
        """
        if self._storage.size(path) == size:
            if self._disk is None:
                data = self._storage.map(path).data
                if xxhash.xxh3_128_hexdigest(data) == checksum:
                    return
            else:
                room = self._room()[0]
                with _refusing("read", path):
                    full = str(self._disk.root / path)
                    if not bulk.check_image(full, size, [checksum], chunk_bytes=size, buffer=room):
                        return
        raise DamagedError(
            "reads back wrong right after it was written",
            where=path,
            rule="a segment is named by a checkpoint only if it reads back as written",
            way_out="check the disk",
        )

    def _room(self) -> list[memoryview]:
        if not self._buffers:
            self._buffers = [bulk.chunk_buffer() for _ in range(_BUFFERS)]
        return self._buffers


def _append(storage: Storage, path: str, index: bytes, arrays: Mapping[str, Array]) -> str:
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
        return state.hexdigest()
    finally:
        file.close()


@contextlib.contextmanager
def _refusing(action: str, path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(action, where=path, error=error) from error
