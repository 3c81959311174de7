"""A process that writes large files, so that the one that trains does not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from perdure.storage import bulk

START_S = 30.0
"""Longest time a process may take until it answers for the first time."""
MAPPED = 2
"""Memories a process holds at most; others are kept alive by nobody."""
_KILL_WAIT_S = 5.0
_PROGRAM = "import sys; sys.path += sys.argv[1:3]; from bulk.server import main; main()"
"""The folder of :mod:`bulk` as a package of its own. The standard library's names come first."""


class BulkProcessLost(Exception):
    """The process died, or showed no sign of life in time; it has been killed.

    ``started`` is False if it never answered at all.
    """

    def __init__(self, reason: str, *, started: bool) -> None:
        super().__init__(reason)
        self.started = started


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory behind a descriptor; ``key`` is never used for another one."""

    key: int
    descriptor: int
    size: int


class BulkProcess:
    """Starts on the first job. One owner at a time; every wait ends after ``stall_s`` at most.

    Args:
        stall_s: Longest time without a sign of life; there is one after every chunk, none during
            the fsync.
    """

    def __init__(self, *, stall_s: float) -> None:
        self._stall_s = stall_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._received = b""
        self._mapped: list[int] = []

    @property
    def pid(self) -> int | None:
        """Of the running process, if there is one."""
        return None if self._process is None else self._process.pid

    def write(
        self, path: str, memory: SharedMemory, offset: int, size: int, *, sums: bool
    ) -> tuple[str, ...]:
        """:func:`bulk.write_image` over there; without ``sums`` no checksum is taken.

        Raises:
            OSError: The file system refused.
            BulkProcessLost: The process is gone; a part of the file may be there.
        """
        if self._process is None:
            self._start()
        self._map(memory)
        job = {"do": "write", "memory": memory.key, "path": path, "offset": offset, "size": size}
        answer = self._ask({**job, "sums": sums})
        return tuple(answer["sums"] or ())

    def check(self, path: str, size: int, chunks: Sequence[str]) -> list[int]:
        """:func:`bulk.check_image` over there; raises like :meth:`write`."""
        if self._process is None:
            self._start()
        job = {"do": "check", "path": path, "size": size, "chunks": list(chunks)}
        return list(self._ask(job)["bad"])

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                self._kill()
        self._process, self._connection = None, None
        self._received = b""
        self._mapped.clear()

    def interrupt(self) -> None:
        """From another thread: kill it. Whoever waits for it learns that it is lost."""
        process = self._process
        if process is not None:
            process.kill()

    def _map(self, memory: SharedMemory) -> None:
        """Have the process map it, and let go of the one it has not used for longest."""
        if memory.key in self._mapped:
            self._mapped.remove(memory.key)
        else:
            if len(self._mapped) == MAPPED:
                self._ask({"do": "forget", "memory": self._mapped.pop(0)})
            job = {"do": "map", "memory": memory.key, "size": memory.size}
            self._ask(job, descriptors=(memory.descriptor,))
        self._mapped.append(memory.key)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # Without site-packages: it is told where the one library that it needs lies.
        found = [str(Path(str(module.__file__)).parent.parent) for module in (bulk, xxhash)]
        program = [_PROGRAM, *found, str(theirs.fileno()), str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", *program],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            raise BulkProcessLost(f"cannot be started ({error})", started=False) from error
        self._connection = ours
        try:
            self._ask({"do": "greet"}, timeout_s=START_S)
        except BulkProcessLost as lost:
            raise BulkProcessLost(f"did not start ({lost})", started=False) from lost

    def _ask(
        self,
        job: dict[str, Any],
        *,
        descriptors: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        connection = self._connection
        assert connection is not None
        connection.settimeout(self._stall_s if timeout_s is None else timeout_s)
        data = json.dumps(job).encode() + b"\n"
        try:
            if descriptors:
                sent = socket.send_fds(connection, [data], descriptors)
                data = data[sent:]
            connection.sendall(data)
            answer = json.loads(self._answer(connection))
        except TimeoutError as error:
            raise self._lost("shows no sign of life") from error
        except (OSError, EOFError) as error:
            raise self._lost("died") from error
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return answer

    def _answer(self, connection: socket.socket) -> bytes:
        """The next line that is not empty; empty ones are signs of life."""
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                if line:
                    return line
                continue
            data = connection.recv(1 << 20)
            if not data:
                raise EOFError
            self._received += data

    def _lost(self, reason: str) -> BulkProcessLost:
        self._kill()
        status = None if self._process is None else self._process.returncode
        self.close()
        return BulkProcessLost(f"{reason} (exit status {status})", started=True)

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        try:
            self._process.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            # It hangs in the kernel. What it still writes goes to a file that has no name any more.
            return
