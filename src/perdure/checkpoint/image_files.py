"""Three ways to get the image of a file onto the disk and to check that it is there."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import Literal, Protocol

from perdure.checkpoint.arena import Arena
from perdure.checkpoint.files import FileEntry, FileProblem, wrong_bytes
from perdure.checkpoint.layout import FileImage
from perdure.checkpoint.verification import check_file
from perdure.core.errors import StorageError
from perdure.core.events import EventSink
from perdure.core.storage_api import Storage
from perdure.storage import PosixStorage, bulk
from perdure.storage.bulk_process import BulkProcess, BulkProcessLost
from perdure.storage.refusals import refusal

Sums = tuple[str, ...] | None
"""xxh3-128 of the chunks of a file, in hex, if they were taken as it was copied."""

WriterKind = Literal["auto", "process", "thread"]

PROCESS_FROM_BYTES = 64 << 20
"""What a checkpoint must weigh before ``auto`` thinks a process of its own worth it."""
STARTS = 3
"""Processes in a row that may end before they have answered; then a thread writes for good."""
_TRIES = 2
"""How often one file is begun."""


class ImageFiles(Protocol):
    """Used by the thread that saves."""

    def write(self, path: str, arena: Arena, image: FileImage, sums: Sums) -> FileEntry:
        """Create a file; its content is durable on return, its name is not.

        Args:
            path: A file that does not exist.
            arena: Where its bytes lie.
            image: Which of them.
            sums: Checksums of its chunks; None: they are taken now.

        Raises:
            StorageError: The storage refused; a part of the file may be there.
        """
        ...

    def write_small(self, path: str, data: bytes) -> FileEntry:
        """The same for bytes that lie in no arena, and that nobody gives up."""
        ...

    def check(self, root: str, file: str, entry: FileEntry) -> FileProblem | None:
        """What is wrong with a file just written, if anything."""
        ...

    def give_up(self) -> None:
        """From another thread: what is being written fails at its next chunk."""
        ...

    def close(self) -> None: ...


def image_files(
    storage: Storage, *, writer: WriterKind, stall_s: float, events: EventSink
) -> ImageFiles:
    """The best way for this storage and the writer asked for."""
    if not isinstance(storage, PosixStorage) or sys.platform != "linux":
        return StorageFiles(storage)
    if writer == "thread":
        return DirectFiles(storage)
    return ProcessFiles(storage, stall_s=stall_s, events=events)


def share_from(writer: WriterKind) -> int | None:
    """The size from which an arena is to be mapped by another process."""
    return {"auto": PROCESS_FROM_BYTES, "process": 0, "thread": None}[writer]


class StorageFiles:
    """Through the storage's own methods: for everything that is no disk of Linux."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._giving_up = GivingUp()

    def write(self, path: str, arena: Arena, image: FileImage, sums: Sums) -> FileEntry:
        data = arena.file_bytes(image)
        progress = self._giving_up.check
        return append_file(self._storage, path, data, sums=sums, progress=progress)

    def write_small(self, path: str, data: bytes) -> FileEntry:
        return append_file(self._storage, path, memoryview(data))

    def check(self, root: str, file: str, entry: FileEntry) -> FileProblem | None:
        return check_file(self._storage, root, file, entry)

    def give_up(self) -> None:
        self._giving_up.set()

    def close(self) -> None:
        """Nothing is held."""


class DirectFiles:
    """Past the page cache, in the thread that saves."""

    def __init__(self, storage: PosixStorage) -> None:
        self._storage = storage
        self._room = bulk.Room()
        self.giving_up = GivingUp()

    def write(self, path: str, arena: Arena, image: FileImage, sums: Sums) -> FileEntry:
        full, data = self._storage.full(path), arena.file_blocks(image)
        progress = self.giving_up.check
        with _refusing("write", path):
            if sums is None:
                sums = bulk.write_image(full, data, image.size, progress=progress)
            else:
                bulk.write_parts(full, [data], image.size, buffer=None, progress=progress)
        return FileEntry.chunked(image.size, sums)

    def write_small(self, path: str, data: bytes) -> FileEntry:
        with _refusing("write", path):
            sums = bulk.write_image(self._storage.full(path), memoryview(data), len(data))
        return FileEntry.chunked(len(data), sums)

    def check(self, root: str, file: str, entry: FileEntry) -> FileProblem | None:
        path = f"{root}/{file}"
        if not has_size(self._storage, path, entry):
            return check_file(self._storage, root, file, entry)
        with _refusing("read", path):
            bad = bulk.check_image(
                self._storage.full(path),
                entry.bytes,
                entry.sums,
                room=self._room,
                progress=self.giving_up.check,
            )
        return _problem(file, bad, entry)

    def give_up(self) -> None:
        self.giving_up.set()

    def close(self) -> None:
        """Nothing is held."""


class ProcessFiles:
    """Past the page cache, in a process of its own that shares the arenas.

    A process that dies or hangs is replaced, and what it was doing is done once more. If
    :data:`STARTS` of them in a row have not even started, a thread does without from then on. What
    lies in an arena that is not shared is written by the thread that saves.

    Args:
        storage: The run's storage.
        stall_s: Longest time without a sign of life.
        events: Receives ``checkpoint_writer_lost``.
    """

    def __init__(self, storage: PosixStorage, *, stall_s: float, events: EventSink) -> None:
        self._storage = storage
        self._direct = DirectFiles(storage)
        self._events = events
        self._process = BulkProcess(stall_s=stall_s)
        self._not_started = 0

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return self._process.pid

    def write(self, path: str, arena: Arena, image: FileImage, sums: Sums) -> FileEntry:
        full = self._storage.full(path)
        self._direct.giving_up.check()
        begun = 0
        while begun < _TRIES:
            memory = arena.shared
            if memory is None or self._not_started == STARTS:
                return self._direct.write(path, arena, image, sums)
            try:
                with _refusing("write", path):
                    taken = self._process.write(
                        full, memory, image.arena_offset, image.size, sums=sums is None
                    )
                self._not_started = 0
                return FileEntry.chunked(image.size, taken if sums is None else sums)
            except BulkProcessLost as lost:
                begun += lost.started
                self._lost(lost)
                # Whoever may still write to it has lost its name.
                self._storage.remove(path)
        raise _gave_up(path)

    def write_small(self, path: str, data: bytes) -> FileEntry:
        return self._direct.write_small(path, data)

    def check(self, root: str, file: str, entry: FileEntry) -> FileProblem | None:
        path = f"{root}/{file}"
        full = self._storage.full(path)
        for _ in range(_TRIES):
            if self._process.pid is None or not has_size(self._storage, path, entry):
                return self._direct.check(root, file, entry)
            try:
                with _refusing("read", path):
                    bad = self._process.check(full, entry.bytes, entry.sums)
                return _problem(file, bad, entry)
            except BulkProcessLost as lost:
                self._lost(lost)
        raise _gave_up(path)

    def give_up(self) -> None:
        self._direct.give_up()
        self._process.interrupt()

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _lost(self, lost: BulkProcessLost) -> None:
        self._direct.giving_up.check()
        self._not_started = 0 if lost.started else self._not_started + 1
        replacement = "a thread" if self._not_started == STARTS else "another one"
        self._events("checkpoint_writer_lost", {"reason": str(lost), "replacement": replacement})


class GivingUp:
    """Lets another thread make a write fail."""

    def __init__(self) -> None:
        self._given_up = threading.Event()

    def set(self) -> None:
        """Whoever checks next fails."""
        self._given_up.set()

    def check(self) -> None:
        """Raises ``StorageError`` once given up."""
        if self._given_up.is_set():
            raise StorageError(
                "the save was given up",
                rule="when the loop is left, a save is waited for until a deadline",
                way_out="look at the disk, or raise must_timeout_s or grace_s",
            )


def append_file(
    storage: Storage,
    path: str,
    data: memoryview,
    *,
    sums: Sums = None,
    progress: Callable[[], None] = bulk.no_progress,
) -> FileEntry:
    """Write a new file durably; the checksums are those of the memory.

    ``progress`` is called after every chunk.
    """
    taken = bulk.ChunkSums(bulk.CHUNK_BYTES)
    file = storage.create_append(path)
    try:
        for start in range(0, data.nbytes, bulk.CHUNK_BYTES):
            piece = data[start : start + bulk.CHUNK_BYTES]
            if sums is None:
                taken.update(piece)
            file.append([piece])
            progress()
        file.sync()
    finally:
        file.close()
    return FileEntry.chunked(data.nbytes, taken.hexdigests() if sums is None else sums)


def has_size(storage: Storage, path: str, entry: FileEntry) -> bool:
    """Whether the file is there and as long as it should be."""
    return storage.exists(path) and storage.size(path) == entry.bytes


def _problem(file: str, bad: list[int], entry: FileEntry) -> FileProblem | None:
    return wrong_bytes(file, bad, entry) if bad else None


@contextlib.contextmanager
def _refusing(action: str, path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(action, where=path, error=error) from error


def _gave_up(path: str) -> StorageError:
    return StorageError(
        "the writer process was lost twice",
        where=path,
        rule="a save is tried once more, then it counts as failed; training goes on",
        way_out="look at the memory and the disk, or set the writer to thread",
    )
