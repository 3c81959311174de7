"""Fetching files from the remote tier: in parallel, verified before they get their name."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import xxhash

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.tier.objects import ObjectStore
from perdure.checkpoint.tier.options import TierOptions
from perdure.checkpoint.tier.pieces import in_order
from perdure.core.errors import DamagedError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.storage_api import Storage
from perdure.storage import PosixStorage, bulk
from perdure.storage.refusals import refusal

_TRIES = 3
"""Fetches of a file whose bytes arrive wrong, before the remote copy is called damaged."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``start`` to ``end`` of an object of ``bytes``.

    ``checksum``, if not empty, is the xxh3-128 of the whole object.
    """

    key: str
    bytes: int
    start: int
    end: int
    checksum: str = ""

    @classmethod
    def all_of(cls, key: str, size: int) -> Range:
        """A whole object."""
        return cls(key, size, 0, size)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file of the run and the ranges it consists of, in order."""

    path: str
    entry: FileEntry
    ranges: tuple[Range, ...]
    """``entry`` may have no checksum: then each range has one."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A range in a buffer that is to be given back; None: its object is not what it should be."""

    buffer: memoryview
    data: memoryview | None


@dataclass(slots=True)
class _Arriving:
    """The ranges of one file, as they come: ``(offset in the file, data, its buffer)``.

    Their buffers are given back. What is wrong is left out, and noted.
    """

    file: Wanted
    arrived: Iterator[_Arrived]
    buffers: SimpleQueue[memoryview]
    right: bool = True

    def __iter__(self) -> Generator[tuple[int, memoryview, memoryview]]:
        wanted, position = self.file.entry, 0
        sums = bulk.ChunkSums(wanted.chunk_bytes)
        for one in self.file.ranges:
            got = next(self.arrived)
            if got.data is None:
                self.right = False
            else:
                sums.update(got.data)
                yield position, got.data, got.buffer
            position += one.end - one.start
            self.buffers.put(got.buffer)
        self.right = self.right and position == wanted.bytes
        if wanted.sums:
            self.right = self.right and sums.hexdigests() == wanted.sums


@dataclass(frozen=True, slots=True)
class Download:
    """Fetches files into a run's directory; what has its name there is whole."""

    storage: Storage
    objects: ObjectStore
    options: TierOptions
    executor: Executor
    faults: FaultHook

    def run(self, wanted: Sequence[Wanted]) -> int:
        """Fetch the files that are missing or damaged; returns the bytes fetched.

        Raises:
            DamagedError: An object is missing, or arrives wrong again and again.
            RemoteUnavailableError: The store failed too often.
            StorageError: The local disk refused.
        """
        missing = [file for file in wanted if not self._is_here(file)]
        folders = {posixpath.dirname(file.path) for file in missing}
        for folder in sorted(folders):
            self.storage.make_dirs(folder)
        left: Sequence[Wanted] = missing
        for _ in range(_TRIES):
            left = self._fetch(left)
            if not left:
                break
        else:
            raise DamagedError(
                "the copy in the remote tier is damaged",
                where=", ".join(file.path for file in left),
                rule="a file gets its name only if every byte is right",
                way_out="another checkpoint of the remote tier may be whole: "
                "perdure ckpt pull tries them in turn",
            )
        for folder in sorted(folders):
            self.storage.sync_dir(folder)
        return sum(file.entry.bytes for file in missing)

    def _is_here(self, file: Wanted) -> bool:
        if not self.storage.exists(file.path):
            return False
        if not file.entry.sums:
            return self.storage.size(file.path) >= file.entry.bytes
        if self.storage.size(file.path) != file.entry.bytes:
            return False
        return not file.entry.bad_chunks(self.storage.map(file.path).data)

    def _fetch(self, files: Sequence[Wanted]) -> list[Wanted]:
        """Fetch each file once; returns those that arrived wrong."""
        largest = max((one.bytes for file in files for one in file.ranges), default=0)
        # One more than requests are under way: the one that is being written.
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(self.options.parallel + 1):
            buffers.put(bulk.huge_pages(bulk.aligned(largest) or bulk.ALIGNMENT))
        calls = (partial(self._read, one, buffers) for file in files for one in file.ranges)
        arrived = in_order(
            self.executor,
            calls,
            ahead=self.options.parallel,
            timeout_s=self.options.call_timeout_s,
        )
        wrong = [file for file in files if not self._write(_Arriving(file, arrived, buffers))]
        assert next(arrived, None) is None
        return wrong

    def _read(self, one: Range, buffers: SimpleQueue[memoryview]) -> _Arrived:
        buffer = buffers.get(timeout=self.options.call_timeout_s)
        out = buffer[: one.bytes]
        try:
            right = self.objects.read_into(one.key, out)
        except FileNotFoundError as error:
            raise DamagedError(
                "an object is missing in the remote tier",
                where=one.key,
                rule="what the pointer names is there",
                way_out="perdure ckpt push stores it again, if the run's own disk is there",
            ) from error
        if one.checksum:
            right = right and xxhash.xxh3_128_hexdigest(out) == one.checksum
        return _Arrived(buffer, out[one.start : one.end] if right else None)

    def _write(self, coming: _Arriving) -> bool:
        """Write one file under a temporary name; it gets its own if every byte is right."""
        path = coming.file.path
        folder, name = posixpath.split(path)
        temporary = posixpath.join(folder, f".tmp-{name}")
        self.storage.remove(temporary)
        if isinstance(self.storage, PosixStorage) and _in_blocks(coming.file):
            _write_direct(self.storage, temporary, coming)
        else:
            _append(self.storage, temporary, coming)
        if coming.right:
            self.storage.rename(temporary, path)
            self.faults.reach(FaultPoint.REMOTE_FILE_PULLED)
        else:
            self.storage.remove(temporary)
        return coming.right


def _in_blocks(file: Wanted) -> bool:
    """Whether it can be written past the page cache, which costs a fraction of the CPU."""
    ends = [one.end for one in file.ranges]
    return (
        sys.platform == "linux"
        and sum(ends) == file.entry.bytes
        and not any(one.start for one in file.ranges)
        and not any(end % bulk.ALIGNMENT for end in ends[:-1])
    )


def _write_direct(disk: PosixStorage, path: str, coming: _Arriving) -> None:
    blocks = ((at, buffer[: bulk.aligned(data.nbytes)]) for at, data, buffer in coming)
    try:
        bulk.write_blocks(disk.full(path), blocks, coming.file.entry.bytes)
    except OSError as error:
        raise refusal("write", where=path, error=error) from error


def _append(storage: Storage, path: str, coming: _Arriving) -> None:
    out = storage.create_append(path)
    try:
        for _, data, _ in coming:
            out.append([data])
        if coming.right:
            out.sync()
    finally:
        out.close()
