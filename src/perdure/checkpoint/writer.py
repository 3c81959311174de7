"""Making a staged checkpoint durable: parts first, the manifest last, every step on disk."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.image_files import ImageFiles
from perdure.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    digest_of,
    directory_path,
)
from perdure.checkpoint.snapshot import Snapshot
from perdure.core.errors import DamagedError, StorageError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.storage_api import Storage


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


def write_files(
    storage: Storage, snapshot: Snapshot, faults: FaultHook, *, images: ImageFiles
) -> Manifest:
    """Write all files but the manifest; they are durable on return.

    Order: every file under a temporary name, synced and renamed → directories synced → every file
    read back and compared.

    Returns:
        The manifest, with the checksums of what was written.

    Raises:
        StorageError: The storage refused; what was written may lie around.
        DamagedError: A file reads back differently from what was written.
    """
    root = directory_path(snapshot.manifest.name.directory)
    folders = _folders(
        root, [*(image.path for image in snapshot.layout.images), *snapshot.small_files]
    )
    for folder in folders:
        if not any(other.startswith(f"{folder}/") for other in folders):
            storage.make_dirs(folder)
    files = _write_files(storage, snapshot, faults, images=images)
    for folder in folders:
        storage.sync_dir(folder)
    for path, entry in files.items():
        _verify_written(images, root, path, entry)
    faults.reach(FaultPoint.CHECKPOINT_FILES_DURABLE)
    return snapshot.manifest.with_files(files)


def write_manifest(
    storage: Storage, manifest: Manifest, faults: FaultHook, *, images: ImageFiles
) -> str:
    """Write the manifest, the last file, durably; returns its digest.

    Order: under a temporary name, synced → renamed → directory synced.

    Raises:
        StorageError: The storage refused.
    """
    root = directory_path(manifest.name.directory)
    encoded = manifest.encode()
    temporary = _temporary(f"{root}/{MANIFEST}")
    images.write_small(temporary, encoded)
    faults.reach(FaultPoint.MANIFEST_WRITTEN)
    storage.rename(temporary, f"{root}/{MANIFEST}")
    faults.reach(FaultPoint.MANIFEST_RENAMED)
    storage.sync_dir(root)
    return digest_of(encoded)


def _write_files(
    storage: Storage, snapshot: Snapshot, faults: FaultHook, *, images: ImageFiles
) -> dict[str, FileEntry]:
    root = directory_path(snapshot.manifest.name.directory)
    files: dict[str, FileEntry] = {}

    def rename(path: str) -> None:
        storage.rename(_temporary(f"{root}/{path}"), f"{root}/{path}")
        faults.reach(FaultPoint.CHECKPOINT_FILE_WRITTEN)

    for image in snapshot.layout.images:
        temporary = _temporary(f"{root}/{image.path}")
        sums = snapshot.sums.get(image.path)
        files[image.path] = images.write(temporary, snapshot.arena, image, sums)
        rename(image.path)
    for path, data in snapshot.small_files.items():
        files[path] = images.write_small(_temporary(f"{root}/{path}"), data)
        rename(path)
    return files


def _folders(root: str, paths: Iterable[str]) -> list[str]:
    """Every directory that receives a name, deepest first, ``root`` last."""
    folders = {root}
    for path in paths:
        folder = posixpath.dirname(path)
        while folder:
            folders.add(f"{root}/{folder}")
            folder = posixpath.dirname(folder)
    return sorted(folders, key=lambda folder: (-folder.count("/"), folder))


def _temporary(path: str) -> str:
    folder, name = posixpath.split(path)
    return f"{folder}/.tmp-{name}"


def _verify_written(images: ImageFiles, root: str, file: str, entry: FileEntry) -> None:
    problem = images.check(root, file, entry)
    if problem is not None:
        raise (StorageError if problem.unreadable else DamagedError)(
            f"reads back wrong right after it was written ({problem.reason})",
            where=f"{root}/{file}",
            rule="a checkpoint is committed only if it reads back as written",
            way_out="check the disk, and the memory that the copy lay in",
        )
