"""Reading files back past the page cache, and checking them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Sequence

import xxhash

from .blocks import ALIGNMENT, CHUNK_BYTES, aligned, huge_pages, no_progress, open_direct


class Room:
    """A buffer that is kept: it grows to what was asked for, to a chunk at most. One thread."""

    def __init__(self, buffer: memoryview | None = None) -> None:
        self._buffer = memoryview(b"") if buffer is None else buffer

    def for_file(self, size: int) -> memoryview:
        """Page-aligned room for the chunks of a file of ``size`` bytes, in whole blocks."""
        wanted = min(CHUNK_BYTES, aligned(size) or ALIGNMENT)
        if self._buffer.nbytes < wanted:
            self._buffer = huge_pages(wanted)
        return self._buffer


def check_image(
    path: str,
    size: int,
    chunks: Sequence[str],
    *,
    room: Room | None = None,
    progress: Callable[[], None] = no_progress,
) -> list[int]:
    """Indices of the chunks that the disk, not the page cache, has not as they should be.

    Args:
        path: The file.
        size: Bytes it should have.
        chunks: xxh3-128 of its chunks.
        room: What it is read into, if it is to be kept for the next file.
        progress: Called after every chunk.

    Raises:
        OSError: It is absent or cannot be read.
    """
    bad: list[int] = []
    with open_past_cache(path) as descriptor:
        buffer = (room or Room()).for_file(size)
        for index, checksum in enumerate(chunks):
            # An object, not the one-shot function, so that other threads may run meanwhile.
            piece = read_piece(descriptor, buffer, index * CHUNK_BYTES, size)
            if xxhash.xxh3_128(piece).hexdigest() != checksum:
                bad.append(index)
            progress()
    return bad


@contextlib.contextmanager
def open_past_cache(path: str, *, forget: bool = True) -> Generator[int]:
    """A descriptor for :func:`read_piece`, past the page cache where the file system has O_DIRECT.

    Args:
        path: The file.
        forget: Drop what the page cache has of it, so that in any case the disk is read.
    """
    descriptor = open_direct(path, os.O_RDONLY)
    if descriptor < 0:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if forget:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield descriptor
    finally:
        os.close(descriptor)


def read_piece(descriptor: int, buffer: memoryview, start: int, end: int) -> memoryview:
    """What there is of a file from ``start``, one chunk or up to ``end``, read in whole blocks.

    Args:
        descriptor: Of :func:`open_past_cache`.
        buffer: One of :func:`chunk_buffer`.
        start: A multiple of :data:`ALIGNMENT`.
        end: Where to stop.
    """
    wanted = min(CHUNK_BYTES, end - start)
    filled = 0
    while filled < wanted:
        count = os.preadv(descriptor, [buffer[filled : aligned(wanted)]], start + filled)
        if not count:
            break
        filled += count
    return buffer[: min(filled, wanted)]
