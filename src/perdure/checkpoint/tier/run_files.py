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
"""Folder of files that a run may write again: each state is an object of its own."""


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
            "there is no run here", where=RUN_FILE, rule="a run directory holds run.json"
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
    *,
    incarnation: IncarnationNumber,
    changing: Sequence[str],
) -> dict[str, RemoteFile]:
    """Store the small files that are new; returns all that count from now on.

    Args:
        shipped: What counts until now.
        incarnation: Claims and seals of later ones are left out.
        changing: Files that may be written again (``config.yaml``); absent ones are left out.

    Raises:
        FencedError: One that is written once is another one there: the run goes on elsewhere.
    """
    files = dict(shipped)
    for path in [*_settled(storage, incarnation), *changing]:
        try:
            data = storage.read(path)
        except FileNotFoundError:
            continue
        checksum = xxhash.xxh3_128_hexdigest(data)
        known = files.get(path)
        if known is not None and known.checksum == checksum:
            continue
        if is_settled(path):
            files[path] = RemoteFile(path, len(data), checksum)
            if known is not None or not _store_once(objects, path, data):
                raise separate_ways("another file of this name is in the remote tier", where=path)
        else:
            key = f"{COPIES}/{checksum}/{path}"
            objects.create(key, data)
            files[path] = RemoteFile(key, len(data), checksum)
    return files


def _settled(storage: Storage, incarnation: IncarnationNumber) -> list[str]:
    """``run.json``, claims and seals, in the order in which they may be relied upon."""
    paths = [RUN_FILE]
    for folder in (INCARNATION_DIR, SEAL_DIR):
        numbers = (name.removesuffix(".json") for name in storage.list(folder))
        known = sorted(int(number) for number in numbers if number.isdecimal())
        paths += [f"{folder}/{number}.json" for number in known if number <= incarnation]
    return paths


def _store_once(objects: ObjectStore, key: str, data: bytes) -> bool:
    """Create an object; False if one with other bytes has the key."""
    return objects.create(key, data) or objects.read(key) == data
