"""Getting the file of a segment onto the disk, and checking that it is there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping

import xxhash

from perdure.checkpoint.segments.format import (
    BLOCK_BYTES,
    Array,
    aligned,
    block_checksums,
    decode_index,
    pieces,
)
from perdure.checkpoint.segments.memory import SegmentMemory
from perdure.core.errors import DamagedError
from perdure.core.storage_api import Storage
from perdure.storage import PosixStorage, bulk
from perdure.storage.refusals import refusal

_WINDOW_BYTES = 4 * BLOCK_BYTES
"""Hashed twice in a row: it fits into the processor's cache, and lets other threads run."""

_Read = Callable[[int, int], memoryview]
"""Where from, up to where; at most ``bulk.CHUNK_BYTES``, fewer only if the file ends before."""


class SegmentFiles:
    """Writes and reads back segments, past the page cache where the storage is a disk of Linux.

    It then holds a buffer of 8 MiB at most. One thread at a time.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._disk = storage if isinstance(storage, PosixStorage) else None
        if sys.platform != "linux":
            self._disk = None
        self._room = bulk.Room()

    def write(
        self, path: str, index: bytes, arrays: Mapping[str, Array], memory: SegmentMemory | None
    ) -> None:
        """Create a file; its content is durable on return, its name is not.

        Args:
            path: A file that does not exist.
            index: Its index.
            arrays: Its columns.
            memory: Where they may lie as they will in the file: then they are not copied.

        Raises:
            StorageError: The storage refused; a part of the file may be there.
        """
        if self._disk is None:
            _append(self._storage, path, index, arrays)
            return
        parts = list(pieces(index, arrays))
        size = sum(part.nbytes for part in parts)
        image = None if memory is None else memory.image(index, arrays)
        with _refusing("write", path):
            full = self._disk.full(path)
            if image is None:
                bulk.write_parts(full, parts, size, buffer=self._room.for_file(bulk.CHUNK_BYTES))
            else:
                bulk.write_parts(full, [image.data], size, buffer=None)

    def read_back(self, path: str, index: bytes) -> str:
        """Compare a file with the index of what was to be written, every byte.

        Returns:
            xxh3-128 of the file.

        Raises:
            DamagedError: It is not what was to be written.
            StorageError: The storage refused.
        """
        checksum = None
        size = decode_index(index).file_bytes
        if self._storage.size(path) == size:
            with self._reading(path, size) as read:
                checksum = _checksum_if_right(read, index)
        if checksum is None:
            raise DamagedError(
                "reads back wrong right after it was written",
                where=path,
                rule="a segment is named by a checkpoint only if it reads back as written",
                way_out="check the disk",
            )
        return checksum

    @contextlib.contextmanager
    def _reading(self, path: str, size: int) -> Generator[_Read]:
        if self._disk is None:
            data = self._storage.map(path).data
            yield lambda start, end: data[start : min(end, start + bulk.CHUNK_BYTES)]
            return
        room = self._room.for_file(size)
        with (
            _refusing("read", path),
            bulk.open_past_cache(self._disk.full(path)) as descriptor,
        ):
            yield lambda start, end: bulk.read_piece(descriptor, room, start, end)


def _append(storage: Storage, path: str, index: bytes, arrays: Mapping[str, Array]) -> None:
    """Through the storage's own methods, for everything that is no disk of Linux."""
    file = storage.create_append(path)
    try:
        for part in pieces(index, arrays):
            for start in range(0, part.nbytes, bulk.CHUNK_BYTES):
                file.append([part[start : start + bulk.CHUNK_BYTES]])
        file.sync()
    finally:
        file.close()


def _checksum_if_right(read: _Read, index: bytes) -> str | None:
    """xxh3-128 of a file that has this index, blocks with its checksums, and zeros between."""
    said = decode_index(index)
    whole = xxhash.xxh3_128(index)
    for start in range(0, said.bytes, bulk.CHUNK_BYTES):
        piece = index[start : start + bulk.CHUNK_BYTES]
        if bytes(read(start, start + len(piece))) != piece:
            return None
    for place in said.columns.values():
        start = said.bytes + place.offset
        stop = start + said.rows * place.row_bytes
        end = min(aligned(stop), said.file_bytes)
        if _block_sums(read, start, stop, end, whole=whole) != place.blocks.tolist():
            return None
    return whole.hexdigest()


def _block_sums(
    read: _Read, start: int, stop: int, end: int, *, whole: xxhash.xxh3_128
) -> list[int] | None:
    """Checksums of a column's blocks; None if not all is zero from ``stop`` to ``end``.

    Everything that is read goes into ``whole`` too.
    """
    sums: list[int] = []
    for place in range(start, end, bulk.CHUNK_BYTES):
        piece = read(place, end)
        data, zeros = piece[: stop - place], piece[stop - place :]
        for inside in range(0, data.nbytes, _WINDOW_BYTES):
            window = data[inside : inside + _WINDOW_BYTES]
            # The blocks first: theirs are the smaller steps to bring it into the cache by.
            sums += block_checksums(window)
            whole.update(window)
        if bytes(zeros).strip(b"\0"):
            return None
        whole.update(zeros)
    return sums


@contextlib.contextmanager
def _refusing(action: str, path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(action, where=path, error=error) from error
