"""Which checkpoints have to stay on the local disk for the remote tier's sake.

A checkpoint that the log lists as collected does not count any more, wherever its bytes are. So
nothing may be collected that the remote pointer names, or that is on its way there. What is pinned
is on disk before the pointer moves: a process that starts while the store is down knows it too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perdure.core import sealed_json
from perdure.core.errors import DamagedError
from perdure.core.storage_api import Storage

REMOTE_FILE = "remote.json"
FORMAT = 1


class Pins:
    """The pinned checkpoints of one run, kept in ``remote.json``. Thread-safe.

    Raises:
        FutureFormatError: The file is of a newer format.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._pinned, self._unknown = _read(storage)
        self._uploading = ""
        self._gone: set[str] = set()

    def let_go(self, directories: Iterable[str]) -> tuple[str, ...]:
        """Those of the directories that may be deleted; they are not shipped from now on."""
        with self._lock:
            if self._unknown:
                return ()
            held = {*self._pinned, self._uploading}
            free = tuple(name for name in directories if name not in held)
            self._gone.update(free)
            return free

    def begin(self, directory: str) -> bool:
        """Hold a checkpoint while it is shipped; False if it may be deleted already."""
        with self._lock:
            if directory in self._gone:
                return False
            self._uploading = directory
            return True

    def end(self) -> None:
        """The checkpoint of :meth:`begin` is shipped, or given up for now."""
        with self._lock:
            self._uploading = ""

    def pin(self, directories: Iterable[str], *, notes: Mapping[str, object]) -> None:
        """Pin exactly these, durably; ``notes`` are kept beside them for people and tools."""
        names = sorted(set(directories))
        with self._lock:
            self._pinned = {*names, *self._pinned}
        self._write(names, notes)
        with self._lock:
            self._pinned = set(names)
            self._unknown = False

    def note(self, notes: Mapping[str, object]) -> None:
        """Keep these notes beside what is pinned, unless that is unknown."""
        with self._lock:
            names, unknown = sorted(self._pinned), self._unknown
        if not unknown:
            self._write(names, notes)

    def _write(self, names: Sequence[str], notes: Mapping[str, object]) -> None:
        value = {"format": FORMAT, **notes, "pinned": [*names]}
        self._storage.write_atomic(REMOTE_FILE, sealed_json.encode(value))


def read_notes(storage: Storage) -> Mapping[str, Any] | None:
    """What a tier has left word of in ``remote.json``; None if nothing was ever shipped from here.

    Raises:
        DamagedError, FutureFormatError: The file cannot be used.
    """
    try:
        data = storage.read(REMOTE_FILE)
    except FileNotFoundError:
        return None
    return sealed_json.decode(data, where=REMOTE_FILE, newest_format=FORMAT, fields=("pinned",))


def _read(storage: Storage) -> tuple[set[str], bool]:
    """What is pinned, and whether that is unknown because the file is damaged."""
    try:
        data = storage.read(REMOTE_FILE)
    except FileNotFoundError:
        return set(), False
    try:
        value = sealed_json.decode(
            data, where=REMOTE_FILE, newest_format=FORMAT, fields=("pinned",)
        )
    except DamagedError:
        # The pointer itself says it; until it was read, nothing is let go.
        return set(), True
    return {str(name) for name in value["pinned"]}, False
