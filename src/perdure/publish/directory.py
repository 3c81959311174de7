"""Where published weights lie on their way to other processes of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perdure.core.errors import StorageError
from perdure.storage import PosixStorage

SHARED_MEMORY = Path("/dev/shm")
_COPIES = 2
"""There are two versions at most, while one is published."""
_LOCK = ".lock"


@contextmanager
def weights_directory(weight_bytes: int, *, places: Sequence[Path] = ()) -> Generator[Path]:
    """The name of a directory of this process alone, removed when the body ends.

    A lock beside it falls with the process; directories whose lock is free were left behind by
    killed processes, and are removed first.

    Args:
        weight_bytes: Of one version.
        places: Where it may be, the best first; shared memory and the system's directory for
            temporary files when empty.

    Raises:
        StorageError: None of the places has room for two versions.
    """
    places = places or (SHARED_MEMORY, Path(tempfile.gettempdir()))
    prefix = f"perdure-weights-{os.getuid()}-"
    for place in places:
        if place.is_dir():
            _sweep(PosixStorage(place), prefix)
    storage = PosixStorage(_with_room(places, _COPIES * weight_bytes))
    name = f"{prefix}{uuid.uuid4().hex[:12]}"
    lock = storage.lock(name + _LOCK)
    assert lock is not None
    try:
        yield storage.root / name
    finally:
        storage.remove(name)
        storage.remove(name + _LOCK)
        lock.release()


def _sweep(storage: PosixStorage, prefix: str) -> None:
    for file in storage.list(""):
        if not (file.startswith(prefix) and file.endswith(_LOCK)):
            continue
        lock = storage.lock(file)
        if lock is not None:
            storage.remove(file.removesuffix(_LOCK))
            storage.remove(file)
            lock.release()


def _with_room(places: Sequence[Path], needed: int) -> Path:
    free = {place: shutil.disk_usage(place).free for place in places if place.is_dir()}
    for place, free_bytes in free.items():
        if free_bytes >= needed:
            return place
    shown = ", ".join(f"{place} {free_bytes / 2**30:.2f} GiB" for place, free_bytes in free.items())
    raise StorageError(
        f"there is no room for published weights (free: {shown or 'no such directory'})",
        where="publication",
        rule=f"two versions of the weights take {needed / 2**30:.2f} GiB",
        way_out="make room there, or point TMPDIR at a disk that has it",
    )
