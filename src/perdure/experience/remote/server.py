"""The store's door for other processes."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import threading
from pathlib import Path

from perdure.core.errors import PerdureError, RunBusyError, StorageError
from perdure.core.events import EventSink, ignore_events
from perdure.experience.remote.connection import Connection
from perdure.experience.remote.frames import BadFrameError
from perdure.experience.remote.handshake import run_behind
from perdure.experience.remote.wire import POLL_S, Wire
from perdure.experience.store import ExperienceStore

_BACKLOG = 128
_MAX_CONNECTIONS = 1024
_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED))
"""What the system is short of for a while; the next worker may be luckier."""
_CLOSE_TIMEOUT_S = 30.0
_PROBE_TIMEOUT_S = 1.0


class StoreServer:
    """Lets :class:`RemoteStore` in other processes append sessions to a store, done or not.

    It listens on a Unix socket that only the own user may open. Whoever claimed the run last takes
    the path over from earlier incarnations. Sessions are appended from threads of the server, so
    another thread reads the store through its methods, not through ``state``.
    """

    def __init__(
        self, store: ExperienceStore, path: Path, *, events: EventSink = ignore_events
    ) -> None:
        """Listen at ``path``; the store must commit in a thread of its own.

        Raises:
            RunBusyError: The store of another run listens there.
            StorageError: The socket cannot be made there.
        """
        self._store = store
        self._path = path
        self._events = events
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._failure: Exception | None = None
        self._closing = False
        self._listener = _listen(path, store.run.run_id)
        self._rope, self._bell = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="perdure-remote-accept")
        self._thread.start()

    def serve(self, connected: socket.socket) -> None:
        """Serve a worker over a stream that exists already; the socket is the server's now."""
        with self._lock:
            self._connections = [one for one in self._connections if not one.is_over]
            if self._closing or len(self._connections) >= _MAX_CONNECTIONS:
                connected.close()
                self._warn(f"a worker was turned away: {len(self._connections)} are connected")
                return
            connection = Connection(Wire(connected), self._store, report=self._report)
            self._connections.append(connection)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Accept and read nothing more, answer what was read, end all threads.

        Call it before the store is closed. The path is left for the next incarnation to take over.

        Raises:
            StorageError: Something was not acknowledged within ``timeout_s``.
            Exception: A thread had failed; whatever it was.
        """
        with self._lock:
            self._closing = True
        self._rope.close()
        self._thread.join()
        self._bell.close()
        self._listener.close()
        for connection in self._connections:
            connection.end()
        # The failure of the log reaches the requests that are not answered.
        with contextlib.suppress(PerdureError):
            self._store.urge()
        over = [connection.join(timeout_s) for connection in self._connections]
        if self._failure is not None:
            raise self._failure
        if not all(over):
            raise StorageError(
                f"sessions of workers were not acknowledged within {timeout_s:g} s",
                where=str(self._path),
                rule="storage answers in time",
                way_out="check the disk, then resume the run; the workers append them again",
            )

    def _accept(self) -> None:
        """Consumes connections; waits for workers; ended by ``close`` or the end of the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while not self._closing and threading.main_thread().is_alive():
                selector.select(POLL_S)
                try:
                    connected, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    if error.errno in _PASSING:
                        self._warn(f"no worker can be let in for now: {error}")
                        select.select([self._bell], [], [], POLL_S)
                        continue
                    self._report(error)
                    return
                self.serve(connected)

    def _report(self, error: Exception) -> None:
        self._warn(f"a worker's connection ended: {type(error).__name__}: {error}")
        if not isinstance(error, BadFrameError):
            self._failure = self._failure or error

    def _warn(self, message: str) -> None:
        self._events("warning", {"message": message})


def _listen(path: Path, run_id: str) -> socket.socket:
    """A listening socket that took the path over."""
    _require_free(path, run_id)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        fresh.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        fresh.replace(path)
    except OSError as error:
        listener.close()
        raise StorageError(
            f"no socket can be made here: {error.strerror or error}",
            where=str(path),
            rule="its directory exists and is writable, and the path is shorter than 90 bytes",
            way_out="name another path",
        ) from error
    return listener


def _require_free(path: Path, run_id: str) -> None:
    """See that nothing is lost when the path is taken over."""
    if path.exists() and not path.is_socket():
        raise StorageError(
            "a file that is not a socket is here",
            where=str(path),
            rule="the store listens under a path of its own",
            way_out="name another path, or remove the file",
        )
    other = run_behind(path, timeout_s=_PROBE_TIMEOUT_S)
    if other not in (None, run_id):
        raise RunBusyError(
            f"the store of run {other} listens here",
            where=str(path),
            rule="one run listens under a path",
            way_out="name another path",
        )
