"""Memory and files in whole blocks, as O_DIRECT takes them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

CHUNK_BYTES = 8 << 20
"""Bytes written, hashed and read back at once; each chunk of a file has its own checksum."""

ALIGNMENT = 4096
"""Bytes; O_DIRECT takes memory, offsets and lengths that are multiples of it."""


def no_progress() -> None:
    """Nobody watches."""


def aligned(size: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def chunk_buffer() -> memoryview:
    """Room for one chunk."""
    return huge_pages(CHUNK_BYTES)


def huge_pages(size: int) -> memoryview:
    """Page-aligned zeros. A disk takes far fewer requests for huge pages than for small ones."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def open_direct(path: str, mode: int = os.O_WRONLY) -> int:
    """A descriptor that goes past the page cache, or -1 where the file system has none."""
    try:
        return os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise
