"""Writing files past the page cache, with the checksums of their chunks."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence

import xxhash

from .blocks import CHUNK_BYTES, aligned, no_progress, open_direct
from .sums import ChunkSums

_LIBC = ctypes.CDLL(None, use_errno=True)


def write_image(
    path: str,
    data: memoryview,
    size: int,
    *,
    buffers: Sequence[memoryview] = (),
    step: int = CHUNK_BYTES,
    progress: Callable[[], None] = no_progress,
) -> tuple[str, ...]:
    """Create a file; its content is durable on return, its name is not.

    Args:
        path: A file that does not exist.
        data: The bytes. For O_DIRECT they are page-aligned and reach up to the next multiple of
            :data:`ALIGNMENT` behind ``size``; otherwise they go through the page cache. With
            ``buffers`` they need neither. No thread is started for a single chunk.
        size: Bytes of the file.
        buffers: Two or more of :func:`chunk_buffer`: pieces go through them. Copying costs less
            than what a disk needs longer for memory in small pages.
        step: Bytes that are copied and hashed before the next ones, a divisor of a chunk and a
            multiple of :data:`ALIGNMENT`. What fits a core's cache is read from memory once, not
            for the checksum again; but each step asks for the interpreter's lock, which a busy
            process gives back late.
        progress: Called after every chunk.

    Returns:
        xxh3-128 of its chunks, in hex; of an empty file there is one.

    Raises:
        OSError: The file system refused; a part of the file may be there.
    """
    source = _Source([data], size, bool(buffers))
    feed = _Feed(source, buffers, step)
    try:
        _create(path, size, iter(feed), whole_blocks=source.whole_blocks, progress=progress)
    finally:
        feed.close()
    return feed.sums()


def write_parts(
    path: str,
    parts: Sequence[memoryview],
    size: int,
    *,
    buffer: memoryview | None,
    progress: Callable[[], None] = no_progress,
) -> None:
    """As :func:`write_image`, without checksums and without a thread.

    Args:
        path: A file that does not exist.
        parts: The bytes, one part behind the other. Without a buffer there is only one.
        size: Bytes of the file.
        buffer: One of :func:`chunk_buffer`, which they go through.
        progress: Called after every chunk.

    Raises:
        OSError: The file system refused; a part of the file may be there.
    """
    source = _Source(parts, size, buffer is not None)
    pieces = ((start, source.piece(start, end, buffer)) for start, end in source.ends())
    _create(path, size, pieces, whole_blocks=source.whole_blocks, progress=progress)


def write_blocks(path: str, pieces: Iterable[tuple[int, memoryview]], size: int) -> None:
    """As :func:`write_parts`, of pieces that come by and by.

    Args:
        path: A file that does not exist.
        pieces: ``(offset, blocks)``, page-aligned and one behind the other. The last one reaches
            up to the next multiple of :data:`ALIGNMENT` behind ``size``. Each is used up when the
            next one is asked for.
        size: Bytes of the file.

    Raises:
        OSError: The file system refused; a part of the file may be there.
    """
    _create(path, size, pieces, whole_blocks=True)


def _create(
    path: str,
    size: int,
    pieces: Iterable[tuple[int, memoryview]],
    *,
    whole_blocks: bool,
    progress: Callable[[], None] = no_progress,
) -> None:
    """Write a new file, piece by piece; its content is durable on return."""
    descriptor = direct = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        direct = open_direct(path) if whole_blocks and size else -1
        if whole_blocks:
            _allocate(descriptor, aligned(size))
        for start, blocks in pieces:
            if direct >= 0 and not _write_direct(direct, blocks, start):
                os.close(direct)
                direct = -1
            if direct < 0:
                _write(descriptor, blocks[: size - start], start)
            progress()
        if whole_blocks:
            os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        for opened in (descriptor, direct):
            if opened >= 0:
                os.close(opened)


class _Source:
    """The bytes of a file, in one part or several."""

    def __init__(self, parts: Sequence[memoryview], size: int, copied: bool) -> None:
        assert copied or len(parts) == 1
        self._parts = parts
        self.size = size
        self.whole_blocks = copied or parts[0].nbytes >= aligned(size)
        self._end = aligned(size) if self.whole_blocks else size
        self._part = self._inside = 0

    def ends(self) -> Generator[tuple[int, int]]:
        """Where chunks begin and end, in whole blocks as far as they go."""
        for start in range(0, self.size, CHUNK_BYTES):
            yield start, min(start + CHUNK_BYTES, self._end)

    def piece(self, start: int, end: int, buffer: memoryview | None) -> memoryview:
        """The next chunk, copied if there is a buffer."""
        if buffer is None:
            return self._parts[0][start:end]
        self.copy(buffer[: end - start])
        return buffer[: end - start]

    def copy(self, out: memoryview) -> None:
        """The next bytes, as far as there are any."""
        filled = 0
        while filled < out.nbytes and self._part < len(self._parts):
            piece = self._parts[self._part][self._inside :][: out.nbytes - filled]
            out[filled : filled + piece.nbytes] = piece
            filled += piece.nbytes
            self._inside += piece.nbytes
            if self._inside == self._parts[self._part].nbytes:
                self._part, self._inside = self._part + 1, 0


class _Feed:
    """Pieces of an image in order. A thread is some of them ahead with the checksums.

    One piece is not worth a thread.
    """

    def __init__(self, source: _Source, buffers: Sequence[memoryview], step: int) -> None:
        self._source = source
        self._step = step
        self._ready: queue.SimpleQueue[tuple[int, memoryview] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._copies = bool(buffers)
        self._closed = False
        self._failed = ""
        self._chunks: list[str] = []
        self._thread: threading.Thread | None = None
        if source.size <= CHUNK_BYTES:
            self._run()
        else:
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="checkpoint-hashing")
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error

    def __iter__(self) -> Generator[tuple[int, memoryview]]:
        """``(offset, blocks)``; the blocks are used up when the next ones are asked for.

        Raises:
            OSError: Something ended the thread before the last piece.
        """
        for start, blocks in iter(self._ready.get, None):
            yield start, blocks
            if self._copies:
                # The last one is shorter, and nothing comes behind it.
                self._free.put(blocks)
        if self._failed:
            raise OSError(errno.EIO, f"the checksums ended early ({self._failed})")

    def close(self) -> None:
        """End the thread, wherever it is."""
        self._closed = True
        self._free.put(None)
        if self._thread is not None:
            self._thread.join()

    def sums(self) -> tuple[str, ...]:
        """Those of all pieces."""
        return tuple(self._chunks) or ChunkSums(CHUNK_BYTES).hexdigests()

    def _run(self) -> None:
        try:
            self._pass_on()
        except Exception as error:  # noqa: BLE001 - raised by the one who takes the pieces
            self._failed = repr(error)
        finally:
            self._ready.put(None)

    def _pass_on(self) -> None:
        for start, end in self._source.ends():
            blocks = self._room(start, end)
            if blocks is None or self._closed:
                return
            self._fill(blocks, self._source.size - start)
            self._ready.put((start, blocks))

    def _room(self, start: int, end: int) -> memoryview | None:
        """Where the chunk lies or will; None once nobody wants it any more."""
        if not self._copies:
            return self._source.piece(start, end, None)
        buffer = self._free.get()
        return None if buffer is None else buffer[: end - start]

    def _fill(self, blocks: memoryview, size: int) -> None:
        """Copy the chunk if it has to be, and take the checksum of its first ``size`` bytes."""
        chunk = xxhash.xxh3_128()
        for start in range(0, blocks.nbytes, self._step):
            part = blocks[start : start + self._step]
            if self._copies:
                self._source.copy(part)
            # Objects, not the one-shot function, so that other threads may run meanwhile.
            chunk.update(part[: size - start])
        self._chunks.append(chunk.hexdigest())


def _write_direct(descriptor: int, blocks: memoryview, start: int) -> bool:
    """Write whole blocks; False if the file system takes no O_DIRECT after all."""
    try:
        _write(descriptor, blocks, start)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def _write(descriptor: int, piece: memoryview, offset: int) -> None:
    written = 0
    while written < piece.nbytes:
        written += os.pwrite(descriptor, piece[written:], offset + written)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the blocks at once; a file system that cannot gives them as they are written."""
    while size and _LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
