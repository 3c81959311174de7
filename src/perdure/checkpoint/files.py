"""Checking one file: presence, size and the checksum of every byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from perdure.core.errors import StorageError
from perdure.core.storage_api import Storage


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


def wrong_bytes(file: str, chunks: Sequence[int] = ()) -> FileProblem:
    """The problem of a file whose checksum does not match; it names the first few chunks."""
    shown = ", ".join(str(index) for index in chunks[:5])
    more = f" and {len(chunks) - 5} more" if len(chunks) > 5 else ""
    where = f" in chunk{'s' if len(chunks) > 1 else ''} {shown}{more}" if chunks else ""
    return FileProblem(file, f"checksum does not match{where}", chunks=tuple(chunks))


def file_problem(
    storage: Storage,
    path: str,
    *,
    size: int,
    checksum: str,
    locate: Callable[[memoryview], Sequence[int]] = lambda _: (),
) -> FileProblem | None:
    """What is wrong with the file at ``path``, if anything: presence, size, every byte.

    Args:
        storage: Where it lies.
        path: The file.
        size: Bytes it must have.
        checksum: Its xxh3-128.
        locate: Finds the chunks that are wrong in bytes that are.
    """
    try:
        found = storage.size(path)
        if found != size:
            return FileProblem(path, f"{found} bytes, expected {size}")
        data = storage.map(path).data
        # An object, not the one-shot function, so that other threads may run meanwhile.
        if xxhash.xxh3_128(data).hexdigest() == checksum:
            return None
        return wrong_bytes(path, locate(data))
    except FileNotFoundError:
        return FileProblem(path, "missing")
    except StorageError as error:
        return FileProblem(path, error.what, unreadable=True)
