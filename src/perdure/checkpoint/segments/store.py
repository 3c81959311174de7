"""Segments on disk: each written once, named by checkpoints, deleted when nothing names it.

A file is named by its first row, its rows, the incarnation that wrote it and the checksum of its
bytes, so two writers never mean different bytes by one name, and what an older incarnation deletes
late is nothing that a newer one has written.
"""

from __future__ import annotations

import posixpath
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from perdure.checkpoint.files import FileEntry, FileProblem, file_problem
from perdure.checkpoint.segments import mapped
from perdure.checkpoint.segments.format import encode_index
from perdure.checkpoint.segments.mapped import MappedSegment, Mappings
from perdure.checkpoint.segments.memory import InSegmentMemory
from perdure.checkpoint.segments.writing import SegmentFiles
from perdure.core import sealed_json
from perdure.core.clock import Clock
from perdure.core.components import Segment, StoredSegment
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage

SEGMENTS = "segments"
SUFFIX = ".seg"
UNFINISHED = ".part"

Stored = Mapping[str, tuple[StoredSegment, ...]]
"""Component → its segments, in order."""


class _Written(NamedTuple):
    """A segment that was written in this call."""

    segment: Segment
    stored: StoredSegment


class SegmentStore:
    """The segments of one run, as one engine sees them.

    Writing and deleting happen on the engine's thread, opening on its owner's.
    """

    def __init__(
        self, storage: Storage, *, clock: Clock, faults: FaultHook, events: EventSink
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._faults = faults
        self._events = events
        self._mappings = Mappings(storage)
        self._files = SegmentFiles(storage)
        self._lock = threading.Lock()
        self._live: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()
        self._unnamed: set[str] = set()

    def make_durable(
        self, parts: Mapping[str, Sequence[Segment]], incarnation: IncarnationNumber
    ) -> Stored:
        """Write what is not on disk yet; everything is durable, and reads back, on return.

        Args:
            parts: Component → its segments.
            incarnation: Who writes.

        Raises:
            StorageError: The storage refused. What is durable by then is not written again.
            DamagedError: A file reads back differently from what was written.
        """
        started_s = self._clock.monotonic_s()
        written: list[_Written] = []
        for component, segments in parts.items():
            folder = f"{SEGMENTS}/{component}"
            present = set(self._storage.list(folder))
            missing = [one for one in segments if not _is_present(one, folder, present)]
            if missing and not present:
                # Whoever has put something into it has made it durable before.
                self._storage.make_dirs(folder)
            for segment in missing:
                written.append(self._write(component, segment, incarnation))
                self._faults.reach(FaultPoint.SEGMENT_WRITTEN)
            if missing:
                self._storage.sync_dir(folder)
        for one in written:
            self._remember(one.segment, one.stored)
        if written:
            self._faults.reach(FaultPoint.SEGMENTS_DURABLE)
            write_ms = (self._clock.monotonic_s() - started_s) * 1e3
            size = sum(one.stored.bytes for one in written)
            fields = {"segments": len(written), "bytes": size}
            self._events("segments_stored", {**fields, "write_ms": write_ms})
        return {key: tuple(_stored(one) for one in segments) for key, segments in parts.items()}

    def open(self, component: str, stored: Iterable[StoredSegment]) -> list[MappedSegment]:
        """Open segments without reading their rows; damage found later moves the file away.

        Raises:
            DamagedError: One is absent, or its size or index is wrong.
            StorageError: The storage refuses to read one.
        """
        opened = [
            mapped.open_segment(
                one, component=component, mappings=self._mappings, on_damage=self._set_aside
            )
            for one in stored
        ]
        with self._lock:
            for segment in opened:
                self._live[_stored(segment).path] = segment
        return opened

    def named_now(self, stored: Stored) -> None:
        """A checkpoint that names these was committed: what failed saves left is deleted."""
        named = {one.path for segments in stored.values() for one in segments}
        left, self._unnamed = self._unnamed - named, set[str]()
        self.delete(left)

    def delete(self, paths: Collection[str]) -> None:
        """Delete files that, as the caller knows, no checkpoint names any more.

        One that an object stands for stays: a checkpoint that is being saved may name it. It goes
        after a later commit, as does one that the storage refuses to delete.

        Raises:
            StorageError: The storage refused.
        """
        with self._lock:
            live = {path for path in paths if path in self._live}
        doomed = sorted(set(paths) - live)
        self._unnamed.update(paths)
        for path in doomed:
            self._storage.remove(path)
            self._unnamed.discard(path)
        for folder in sorted({posixpath.dirname(path) for path in doomed}):
            self._storage.sync_dir(folder)

    def _write(self, component: str, segment: Segment, incarnation: IncarnationNumber) -> _Written:
        arrays = {name: segment.view(name, 0, segment.rows) for name in segment.columns}
        index = encode_index(component, segment.first, segment.rows, arrays)
        stem = f"{SEGMENTS}/{component}/{segment.first:012d}-{segment.rows}-{incarnation}"
        unfinished = f"{stem}{UNFINISHED}"
        self._storage.remove(unfinished)
        memory = segment.memory if isinstance(segment, InSegmentMemory) else None
        self._files.write(unfinished, index, arrays, memory)
        checksum = self._files.read_back(unfinished, index)
        size = self._storage.size(unfinished)
        path = f"{stem}-{checksum}{SUFFIX}"
        self._storage.rename(unfinished, path)
        stored = StoredSegment(
            path=path,
            first=segment.first,
            rows=segment.rows,
            bytes=size,
            checksum=checksum,
            index_checksum=xxhash.xxh3_128_hexdigest(index),
        )
        return _Written(segment, stored)

    def _remember(self, segment: Segment, stored: StoredSegment) -> None:
        with self._lock:
            self._live[stored.path] = segment
        self._unnamed.add(stored.path)
        segment.stored = stored
        if isinstance(segment, InSegmentMemory):
            # It is written once; rows that are used again lie in arrays of their own.
            segment.memory = None

    def _set_aside(self, stored: StoredSegment, reason: str) -> None:
        """Move a damaged file away, so that no checkpoint that names it is chosen again."""
        self._events("segment_damaged", {"file": stored.path, "reason": reason})
        target = f"quarantine/{stored.path}"
        folder = posixpath.dirname(target)
        self._storage.make_dirs(folder)
        note = {"format": 1, "file": stored.path, "problems": {stored.path: reason}}
        if not self._storage.exists(f"{target}.reason.json"):
            self._storage.write_atomic(f"{target}.reason.json", sealed_json.encode(note))
        if self._storage.exists(stored.path):
            self._storage.rename(stored.path, target)
            self._storage.sync_dir(folder)
            self._storage.sync_dir(posixpath.dirname(stored.path))


def segment_problem(
    storage: Storage, stored: StoredSegment, *, component: str | None = None
) -> FileProblem | None:
    """What is wrong with a segment; with ``component``, only presence, size and index are read."""
    if component is None:
        return file_problem(storage, stored.path, FileEntry.whole(stored.bytes, stored.checksum))
    index = mapped.read_index(storage, stored, component=component)
    return index if isinstance(index, FileProblem) else None


def files(storage: Storage, folder: str = SEGMENTS) -> tuple[str, ...]:
    """Every file below ``segments``, finished or not."""
    found: list[str] = []
    for name in storage.list(folder):
        path = f"{folder}/{name}"
        if name.endswith((SUFFIX, UNFINISHED)):
            found.append(path)
        elif "." not in name:
            found += files(storage, path)
    return tuple(found)


def _is_present(segment: Segment, folder: str, names: set[str]) -> bool:
    stored = segment.stored
    if stored is None:
        return False
    parent, _, name = stored.path.rpartition("/")
    return parent == folder and name in names


def _stored(segment: Segment) -> StoredSegment:
    assert segment.stored is not None
    return segment.stored
