"""The small files of a run in the remote tier: who it is, who claimed it, where they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from perdure.checkpoint.tier.head import RemoteFile, separate_ways
from perdure.checkpoint.tier.objects import ObjectStore
from perdure.core import sealed_json
from perdure.core.errors import NothingToResumeError
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage

RUN_FILE = "run.json"
INCARNATION_DIR = "incarnations"
SEAL_DIR = "seals"
RUN_FORMAT = 1
COPIES = "files"
"""Folder of the objects."""


def run_id_of(storage: Storage) -> str:
    """The id in ``run.json``.

    Raises:
        NothingToResumeError: There is no run.
        DamagedError, FutureFormatError: The file cannot be used.
    """
    try:
        data = storage.read(RUN_FILE)
    except FileNotFoundError as error:
        raise NothingToResumeError(
            "there is no run here",
            where=RUN_FILE,
            rule="a run directory holds run.json",
            way_out="name the directory of a run",
        ) from error
    value = sealed_json.decode(data, where=RUN_FILE, newest_format=RUN_FORMAT, fields=("run_id",))
    return str(value["run_id"])


def claim_of(storage: Storage, incarnation: IncarnationNumber) -> str:
    """What tells an incarnation from another of the same number: the digest of its file."""
    return xxhash.xxh3_128_hexdigest(storage.read(f"{INCARNATION_DIR}/{incarnation}.json"))


def is_settled(path: str) -> bool:
    """Whether a small file is written once and never again."""
    return path == RUN_FILE or path.startswith((f"{INCARNATION_DIR}/", f"{SEAL_DIR}/"))


def ship_files(
    storage: Storage,
    objects: ObjectStore,
    shipped: Mapping[str, RemoteFile],
    paths: Sequence[str],
) -> dict[str, RemoteFile]:
    """Store the small files that are new; returns all that count from now on.

    Each state of a file is an object of its own. Which of them counts is decided by the pointer
    alone: what a process stored that never moved it is nothing.

    Args:
        storage: The run's storage.
        objects: The run's prefix.
        shipped: What counts until now.
        paths: Files to look at; absent ones are left out.

    Raises:
        FencedError: One that is written once is another one there: the run goes on elsewhere.
    """
    files = dict(shipped)
    for path in paths:
        try:
            data = storage.read(path)
        except FileNotFoundError:
            continue
        checksum = xxhash.xxh3_128_hexdigest(data)
        known = files.get(path)
        if known is not None and known.checksum == checksum:
            continue
        if known is not None and is_settled(path):
            raise separate_ways("another file of this name is in the remote tier", where=path)
        key = f"{COPIES}/{checksum}/{path}"
        objects.create(key, data)
        files[path] = RemoteFile(key, len(data), checksum)
    return files


def claims(storage: Storage, incarnation: IncarnationNumber) -> list[str]:
    """``run.json`` and the claims up to an incarnation: who ships."""
    return [RUN_FILE, *_numbered(storage, INCARNATION_DIR, incarnation)]


def seals(storage: Storage, incarnation: IncarnationNumber) -> list[str]:
    """Seals up to an incarnation. They say how long log files are: they count with the log only."""
    return _numbered(storage, SEAL_DIR, incarnation)


def _numbered(storage: Storage, folder: str, incarnation: IncarnationNumber) -> list[str]:
    numbers = (name.removesuffix(".json") for name in storage.list(folder))
    known = sorted(int(number) for number in numbers if number.isdecimal())
    return [f"{folder}/{number}.json" for number in known if number <= incarnation]
