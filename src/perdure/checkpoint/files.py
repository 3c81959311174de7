"""What a manifest says of one file, and checking it: presence, size and every byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from perdure.core.errors import StorageError
from perdure.core.storage_api import Storage
from perdure.storage import bulk


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size of a file and xxh3-128 of each ``chunk_bytes`` of it, in hex; of an empty one, of it."""

    bytes: int
    chunk_bytes: int
    sums: tuple[str, ...]

    @classmethod
    def whole(cls, size: int, checksum: str) -> FileEntry:
        """A file with one checksum."""
        return cls(size, size, (checksum,))

    @classmethod
    def chunked(cls, size: int, sums: Sequence[str]) -> FileEntry:
        """A file with the checksums of its chunks as :mod:`~perdure.storage.bulk` takes them."""
        return cls(size, bulk.CHUNK_BYTES if len(sums) > 1 else size, tuple(sums))

    def bad_chunks(self, data: memoryview) -> list[int]:
        """Indices of the chunks whose checksum does not match."""
        step = max(1, self.chunk_bytes)
        # Objects, not the one-shot function, so that other threads may run meanwhile.
        return [
            index
            for index, checksum in enumerate(self.sums)
            if xxhash.xxh3_128(data[index * step : (index + 1) * step]).hexdigest() != checksum
        ]

    def encode(self) -> dict[str, Any]:
        """Its part of the manifest."""
        if len(self.sums) == 1:
            return {"bytes": self.bytes, "xxh3_128": self.sums[0]}
        chunks = {"bytes": self.chunk_bytes, "xxh3_128": list(self.sums)}
        return {"bytes": self.bytes, "chunks": chunks}

    @classmethod
    def decode(cls, item: Mapping[str, Any]) -> FileEntry:
        """Read :meth:`encode` back. Raises ``KeyError``, ``TypeError`` or ``ValueError``."""
        size, chunks = int(item["bytes"]), item.get("chunks")
        if chunks is None:
            return cls.whole(size, str(item["xxh3_128"]))
        entry = cls(size, int(chunks["bytes"]), tuple(map(str, chunks["xxh3_128"])))
        if -(-size // max(1, entry.chunk_bytes)) != len(entry.sums):
            raise ValueError("the checksums of the chunks do not cover the file")
        return entry


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with one file of a checkpoint.

    ``file`` is its path inside the checkpoint's directory; that of a segment is its path inside the
    run.
    """

    file: str
    reason: str
    unreadable: bool = False
    """The storage refused to read it, which may pass; otherwise the bytes are wrong or gone."""
    chunks: tuple[int, ...] = ()
    """Indices of the chunks that are wrong, where the manifest has checksums of chunks."""


def wrong_bytes(file: str, bad: Sequence[int], entry: FileEntry) -> FileProblem:
    """The problem of a file some of whose checksums do not match; it names the first few."""
    chunks = tuple(bad) if len(entry.sums) > 1 else ()
    shown = ", ".join(str(index) for index in chunks[:5])
    more = f" and {len(chunks) - 5} more" if len(chunks) > 5 else ""
    where = f" in chunk{'s' if len(chunks) > 1 else ''} {shown}{more}" if chunks else ""
    return FileProblem(file, f"checksum does not match{where}", chunks=chunks)


def file_problem(storage: Storage, path: str, entry: FileEntry) -> FileProblem | None:
    """What is wrong with the file at ``path``, if anything: presence, size, every byte."""
    try:
        found = storage.size(path)
        if found != entry.bytes:
            return FileProblem(path, f"{found} bytes, expected {entry.bytes}")
        bad = entry.bad_chunks(storage.map(path).data)
    except FileNotFoundError:
        return FileProblem(path, "missing")
    except StorageError as error:
        return FileProblem(path, error.what, unreadable=True)
    return wrong_bytes(path, bad, entry) if bad else None
