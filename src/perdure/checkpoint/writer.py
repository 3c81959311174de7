"""Making a staged checkpoint durable: parts first, the manifest last, every step on disk."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import replace

import xxhash

from perdure.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    digest_of,
    directory_path,
)
from perdure.checkpoint.snapshot import Snapshot
from perdure.checkpoint.verification import check_file
from perdure.core.errors import DamagedError, StorageError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.storage_api import Storage

PIECE_BYTES = 8 << 20
"""Bytes hashed and handed to the storage at once."""


def require_empty(storage: Storage, directory: str) -> None:
    """Refuse a directory that holds something, whoever it belongs to.

    Raises:
        StorageError: It is not empty.
    """
    if storage.list(directory_path(directory)):
        raise StorageError(
            "the directory is not empty",
            where=directory_path(directory),
            rule="a checkpoint never overwrites another",
            way_out="move it away",
        )


def write(storage: Storage, snapshot: Snapshot, faults: FaultHook) -> tuple[Manifest, str]:
    """Write all files and the manifest; everything is durable on return.

    Order: every file under a temporary name, synced and renamed → directories synced → every file
    read back and compared → manifest under a temporary name, synced → renamed → directory synced.

    Returns:
        The manifest and its digest.

    Raises:
        StorageError: The storage refused; what was written may lie around.
        DamagedError: A file reads back differently from what was written.
    """
    root = directory_path(snapshot.manifest.name.directory)
    files: dict[str, FileEntry] = {}
    parts = _files(snapshot)
    folders = _folders(root, parts)
    for folder in folders:
        storage.make_dirs(folder)
    for path, data in parts.items():
        files[path] = _write_file(storage, f"{root}/{path}", data)
        faults.reach(FaultPoint.CHECKPOINT_FILE_WRITTEN)
    for folder in folders:
        storage.sync_dir(folder)
    for path, entry in files.items():
        _verify_written(storage, root, path, entry)
    faults.reach(FaultPoint.CHECKPOINT_FILES_DURABLE)
    manifest = replace(snapshot.manifest, files=files)
    encoded = manifest.encode()
    temporary = _temporary(f"{root}/{MANIFEST}")
    _append(storage, temporary, memoryview(encoded))
    faults.reach(FaultPoint.MANIFEST_WRITTEN)
    storage.rename(temporary, f"{root}/{MANIFEST}")
    faults.reach(FaultPoint.MANIFEST_RENAMED)
    storage.sync_dir(root)
    return manifest, digest_of(encoded)


def _files(snapshot: Snapshot) -> dict[str, memoryview]:
    parts = {image.path: snapshot.arena.file_bytes(image) for image in snapshot.layout.images}
    return parts | {path: memoryview(data) for path, data in snapshot.small_files.items()}


def _folders(root: str, paths: Iterable[str]) -> list[str]:
    """Every directory that receives a name, deepest first, ``root`` last."""
    folders = {root}
    for path in paths:
        folder = posixpath.dirname(path)
        while folder:
            folders.add(f"{root}/{folder}")
            folder = posixpath.dirname(folder)
    return sorted(folders, key=lambda folder: (-folder.count("/"), folder))


def _write_file(storage: Storage, path: str, data: memoryview) -> FileEntry:
    temporary = _temporary(path)
    checksum = _append(storage, temporary, data)
    storage.rename(temporary, path)
    return FileEntry(data.nbytes, checksum)


def _append(storage: Storage, path: str, data: memoryview) -> str:
    """Write a new file durably, hashing on the way; the checksum is that of the memory."""
    state = xxhash.xxh3_128()
    file = storage.create_append(path)
    try:
        for start in range(0, data.nbytes, PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            state.update(piece)
            file.append([piece])
        file.sync()
    finally:
        file.close()
    return state.hexdigest()


def _temporary(path: str) -> str:
    folder, name = posixpath.split(path)
    return f"{folder}/.tmp-{name}"


def _verify_written(storage: Storage, root: str, file: str, entry: FileEntry) -> None:
    problem = check_file(storage, root, file, entry)
    if problem is not None:
        raise DamagedError(
            f"reads back wrong right after it was written ({problem.reason})",
            where=f"{root}/{file}",
            rule="a checkpoint is committed only if it reads back as written",
            way_out="check the disk",
        )
