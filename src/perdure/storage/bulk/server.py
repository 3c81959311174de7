"""The process's side of the socket: it writes and checks until the other end is gone.

:mod:`perdure.storage.bulk_process` starts it, without site-packages and without perdure.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import signal
import socket
import sys
from typing import Any

from .blocks import aligned, chunk_buffer
from .reading import Room, check_image
from .writing import write_image, write_parts

_ORPHAN_CHECK_S = 0.5
_RECEIVE_BYTES = 64 << 10
_BUFFERS = 3
_CACHED_BYTES = 256 << 10
_MADV_POPULATE_READ = 22


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
        self._buffers: list[memoryview] = []
        self._room = Room()

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
            return {"sums": self._write(job)}
        elif kind == "check":
            bad = check_image(
                job["path"], job["size"], job["chunks"], room=self._room, progress=self._alive
            )
            return {"bad": bad}
        return {}

    def _write(self, job: dict[str, Any]) -> tuple[str, ...] | None:
        """Checksums are taken only if they are asked for."""
        path, start, size = job["path"], job["offset"], job["size"]
        with memoryview(self._memories[job["memory"]]) as memory:
            data = memory[start : start + aligned(size)]
            if not job["sums"]:
                write_parts(path, [data], size, buffer=None, progress=self._alive)
                return None
            if not self._buffers:
                self._buffers = [chunk_buffer() for _ in range(_BUFFERS)]
            return write_image(
                path, data, size, buffers=self._buffers, step=_CACHED_BYTES, progress=self._alive
            )

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
    """Serve what the command line ends with: descriptor of the socket, process id of the parent."""
    # Sent to the whole group, they are for the parent, which may still want its last save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[-2]))
    with contextlib.suppress(ConnectionError):
        Server(connection, int(sys.argv[-1])).serve()
