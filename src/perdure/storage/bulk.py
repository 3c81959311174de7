"""Large files, written past the page cache, hashed and read back: the library and the process.

Imported, it gives :func:`write_image` and :func:`check_image`. Run as a script it serves them over
a socket until the other end is closed or its parent is gone; :mod:`perdure.storage.bulk_process`
starts it so. It imports nothing of perdure: it must start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":
    # Started without site-packages: the parent says where it found the one library needed.
    sys.path.append(sys.argv[3])

import xxhash

CHUNK_BYTES = 8 << 20
"""Bytes written, hashed and read back at once; each chunk of a file has its own checksum."""

ALIGNMENT = 4096
"""Bytes; O_DIRECT takes memory, offsets and lengths that are multiples of it."""

_ORPHAN_CHECK_S = 0.5
_RECEIVE_BYTES = 64 << 10
_BUFFERS = 3
_MADV_POPULATE_READ = 22
_LIBC = ctypes.CDLL(None, use_errno=True)


class ImageSums(NamedTuple):
    """xxh3-128 of a file and of each of its chunks, in hex."""

    checksum: str
    chunks: tuple[str, ...]


def no_progress() -> None:
    """Nobody watches."""


def write_image(
    path: str,
    data: memoryview,
    size: int,
    *,
    buffers: Sequence[memoryview] = (),
    progress: Callable[[], None] = no_progress,
) -> ImageSums:
    """Create a file; its content is durable on return, its name is not.

    Args:
        path: A file that does not exist.
        data: The bytes. For O_DIRECT they are page-aligned and reach up to the next multiple of
            :data:`ALIGNMENT` behind ``size``; otherwise they go through the page cache.
        size: Bytes of the file.
        buffers: Two or more of :func:`chunk_buffer`: pieces go through them. Copying costs less
            than what a disk needs longer for memory in small pages.
        progress: Called after every chunk.

    Raises:
        OSError: The file system refused; a part of the file may be there.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    direct = _open_direct(path) if data.nbytes >= aligned(size) > 0 else -1
    feed = _Feed(data, size, buffers)
    try:
        _allocate(descriptor, aligned(size))
        for start, blocks in feed:
            if direct >= 0 and not _write_direct(direct, blocks, start):
                os.close(direct)
                direct = -1
            if direct < 0:
                _write(descriptor, blocks[: size - start], start)
            progress()
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        feed.close()
        os.close(descriptor)
        if direct >= 0:
            os.close(direct)
    return feed.sums()


class _Feed:
    """Pieces of an image in order. A thread is some of them ahead with the checksums."""

    def __init__(self, data: memoryview, size: int, buffers: Sequence[memoryview]) -> None:
        self._data, self._size = data, size
        self._ready: queue.SimpleQueue[tuple[int, memoryview] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._copies = bool(buffers)
        self._closed = False
        self._whole = xxhash.xxh3_128()
        self._chunks: list[str] = []
        self._thread = threading.Thread(target=self._run, name="checkpoint-hashing")
        self._thread.start()

    def __iter__(self) -> Generator[tuple[int, memoryview]]:
        """``(offset, blocks)``; the blocks are used up when the next ones are asked for."""
        for start, blocks in iter(self._ready.get, None):
            yield start, blocks
            if self._copies:
                # The last one is shorter, and nothing comes behind it.
                self._free.put(blocks)

    def close(self) -> None:
        """End the thread, wherever it is."""
        self._closed = True
        self._free.put(None)
        self._thread.join()

    def sums(self) -> ImageSums:
        """Those of all pieces."""
        return ImageSums(self._whole.hexdigest(), tuple(self._chunks))

    def _run(self) -> None:
        try:
            for start in range(0, self._size, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, aligned(self._size), self._data.nbytes)
                blocks = self._data[start:end]
                if self._copies:
                    buffer = self._free.get()
                    if buffer is None:
                        return
                    buffer[: end - start] = blocks
                    blocks = buffer[: end - start]
                if self._closed:
                    return
                piece = blocks[: self._size - start]
                self._whole.update(piece)
                # An object, not the one-shot function, so that other threads may run meanwhile.
                self._chunks.append(xxhash.xxh3_128(piece).hexdigest())
                self._ready.put((start, blocks))
        finally:
            self._ready.put(None)


def check_image(
    path: str,
    size: int,
    chunks: Sequence[str],
    *,
    progress: Callable[[], None] = no_progress,
) -> list[int]:
    """Indices of the chunks that the disk, not the page cache, has not as they should be.

    Args:
        path: The file.
        size: Bytes it should have.
        chunks: xxh3-128 of its chunks.
        progress: Called after every chunk.

    Raises:
        OSError: It is absent or cannot be read.
    """
    descriptor = _open_direct(path, os.O_RDONLY)
    if descriptor < 0:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    bad: list[int] = []
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = chunk_buffer()
        for index, checksum in enumerate(chunks):
            found = _read_chunk(descriptor, buffer, index * CHUNK_BYTES, size)
            if xxhash.xxh3_128(found).hexdigest() != checksum:
                bad.append(index)
            progress()
    finally:
        os.close(descriptor)
    return bad


def aligned(size: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


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


def _read_chunk(descriptor: int, buffer: memoryview, start: int, size: int) -> memoryview:
    """What there is of the chunk at ``start`` of a file of ``size`` bytes, read in whole blocks."""
    wanted = min(CHUNK_BYTES, size - start)
    filled = 0
    while filled < wanted:
        count = os.preadv(descriptor, [buffer[filled : aligned(wanted)]], start + filled)
        if not count:
            break
        filled += count
    return buffer[: min(filled, wanted)]


def chunk_buffer() -> memoryview:
    """Room for one chunk. A disk takes far fewer requests for huge pages than for small ones."""
    memory = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _open_direct(path: str, mode: int = os.O_WRONLY) -> int:
    """A descriptor that goes past the page cache, or -1 where the file system has none."""
    try:
        return os.open(path, mode | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the blocks at once; a file system that cannot gives them as they are written."""
    if size and _LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


class Server:
    """The process's side of the socket: one job at a time, an empty line after every chunk.

    Jobs and answers are lines of JSON. ``map`` comes with the descriptor of the memory.
    """

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._received = b""
        self._descriptors: list[int] = []
        self._memories: dict[int, mmap.mmap] = {}
        self._buffers = [chunk_buffer() for _ in range(_BUFFERS)]

    def serve(self) -> None:
        """Work until the parent closes the socket or is gone."""
        while line := self._line():
            job = json.loads(line)
            try:
                answer = self._work(job)
            except OSError as error:
                answer = {"errno": error.errno or errno.EIO}
            self._connection.sendall(json.dumps(answer).encode() + b"\n")

    def _line(self) -> bytes:
        while b"\n" not in self._received:
            if not self._readable():
                return b""
            data, descriptors, _, _ = socket.recv_fds(self._connection, _RECEIVE_BYTES, 1)
            if not data:
                return b""
            self._received += data
            self._descriptors += descriptors
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _readable(self) -> bool:
        """Wait for data; False once nobody can send any.

        The end of the socket is not enough: processes that the parent forked may hold a copy.
        """
        while os.getppid() == self._parent:
            if select.select([self._connection], [], [], _ORPHAN_CHECK_S)[0]:
                return True
        return False

    def _work(self, job: dict[str, Any]) -> dict[str, Any]:
        kind = job["do"]
        if kind == "map":
            self._map(job["memory"], job["size"])
        elif kind == "forget":
            del self._memories[job["memory"]]
        elif kind == "write":
            start = job["offset"]
            with memoryview(self._memories[job["memory"]]) as memory:
                data = memory[start : start + aligned(job["size"])]
                sums = write_image(
                    job["path"],
                    data,
                    job["size"],
                    buffers=self._buffers,
                    progress=self._alive,
                )
            return sums._asdict()
        elif kind == "check":
            bad = check_image(job["path"], job["size"], job["chunks"], progress=self._alive)
            return {"bad": bad}
        return {}

    def _map(self, memory: int, size: int) -> None:
        descriptor = self._descriptors.pop(0)
        try:
            mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            mapped.madvise(_MADV_POPULATE_READ)
        self._memories[memory] = mapped

    def _alive(self) -> None:
        if os.getppid() != self._parent:
            sys.exit("the parent is gone")
        self._connection.sendall(b"\n")


def main() -> None:
    """``bulk.py SOCKET PARENT SITE``: descriptor, process id, where xxhash lies."""
    # Sent to the whole group, they are for the parent, which may still want its last save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ConnectionError):
        Server(connection, int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
