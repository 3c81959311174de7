"""Checking one file: presence, size and the checksum of every byte."""

from __future__ import annotations

from collections.abc import Callable
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


def file_problem(
    storage: Storage,
    path: str,
    *,
    size: int,
    checksum: str,
    explain: Callable[[memoryview], str] = lambda _: "",
) -> FileProblem | None:
    """What is wrong with the file at ``path``, if anything: presence, size, every byte.

    Args:
        storage: Where it lies.
        path: The file.
        size: Bytes it must have.
        checksum: Its xxh3-128.
        explain: Says more about bytes that are wrong, to be added to the reason.
    """
    try:
        found = storage.size(path)
        if found != size:
            return FileProblem(path, f"{found} bytes, expected {size}")
        data = storage.map(path).data
        if xxhash.xxh3_128_hexdigest(data) == checksum:
            return None
        return FileProblem(path, f"checksum does not match{explain(data)}")
    except FileNotFoundError:
        return FileProblem(path, "missing")
    except StorageError as error:
        return FileProblem(path, error.what, unreadable=True)
