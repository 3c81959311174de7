"""A directory as a remote tier: another disk, or a file system that several machines share."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import xxhash

from perdure.checkpoint.tier.objects import Bytes, RemoteUnavailableError, chunk_sums
from perdure.core.errors import ConfigError, StorageError
from perdure.storage import PosixStorage

LOCK = ".lock"
"""Held while an object is swapped. Names that begin with a dot are no objects."""


_SWAP_TIMEOUT_S = 60.0


class LocalObjects:
    """An :class:`~perdure.checkpoint.tier.ObjectStore` of files, durable when a call returns.

    Objects are files at the paths of their keys. A swap holds a kernel lock, so the file system
    must have locks that hold between the machines that use it. obstore's own store of files neither
    syncs what it writes nor replaces a file conditionally.

    Args:
        root: The run's directory there. Its parent has to exist: where nothing is mounted nothing
            is made.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._storage = PosixStorage(root)
        self._folders: set[str] = set()
        self._swapping = threading.Lock()

    def create(self, key: str, data: Bytes) -> bool:
        with self._at(key):
            self._make_folder(key)
            return self._storage.create_exclusive(key, bytes(data))

    def overwrite(self, key: str, data: Bytes) -> None:
        with self._at(key):
            self._make_folder(key)
            self._storage.write_atomic(key, bytes(data))

    def swap(self, key: str, data: Bytes, *, expected: str | None) -> str | None:
        with self._at(key), self._locked(key):
            try:
                found = _tag(self._storage.read(key))
            except FileNotFoundError:
                found = None
            if found != expected:
                return None
            self._make_folder(key)
            self._storage.write_atomic(key, bytes(data))
            return _tag(data)

    def read(self, key: str) -> bytes:
        with self._at(key):
            return self._storage.read(key)

    def read_into(self, key: str, out: memoryview) -> bool:
        with self._at(key), open(self._root / key, "rb") as file:
            return file.readinto(out) == len(out) and not file.read(1)

    def fingerprint(self, key: str, *, chunk_bytes: int) -> tuple[int, tuple[str, ...]]:
        with self._at(key):
            return chunk_sums([self._storage.map(key).data], chunk_bytes)

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        data = self.read(key)
        return data, _tag(data)

    def list(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._at(prefix):
            for path in _files(self._root / prefix):
                # Gone since: somebody deletes what was dropped.
                with contextlib.suppress(FileNotFoundError):
                    found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return found

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._at(key):
                self._storage.remove(key)
        for folder in sorted({os.path.dirname(key) for key in keys}):
            with self._at(folder), contextlib.suppress(FileNotFoundError):
                self._storage.sync_dir(folder)

    def _make_folder(self, key: str) -> None:
        folder = os.path.dirname(key)
        if folder not in self._folders or not (self._root / folder).is_dir():
            self._storage.make_dirs(folder)
            self._folders.add(folder)

    @contextlib.contextmanager
    def _at(self, key: str) -> Generator[None]:
        """Around every call: a tier that is not mounted is never taken for an empty one."""
        parent = self._root.parent
        if not parent.is_dir():
            raise RemoteUnavailableError(
                "there is no such directory",
                where=str(parent),
                rule="the directory that holds the remote tier is there before it is used",
                way_out="mount it, or make it",
            )
        with _translating(key):
            yield

    @contextlib.contextmanager
    def _locked(self, key: str) -> Generator[None]:
        self._make_folder(LOCK)
        with contextlib.ExitStack() as stack:
            mine = self._swapping.acquire(timeout=_SWAP_TIMEOUT_S)
            if mine:
                stack.callback(self._swapping.release)
            lock = self._storage.lock(LOCK) if mine else None
            if lock is None:
                raise RemoteUnavailableError(
                    "another process replaces it at this moment",
                    where=key,
                    rule="one process at a time replaces the pointer",
                    way_out="it is tried again",
                )
            stack.callback(lock.release)
            yield


def open_local(url: str) -> LocalObjects:
    """The objects at ``file:///path``.

    Raises:
        ConfigError: Not such an address.
    """
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute() or path == Path("/") or parts.query or parts.fragment:
        raise ConfigError(
            f"{url!r} is not the address of a directory",
            where="remote",
            rule="three slashes and the whole path, one directory per run",
            way_out="write file:///shared/runs/x",
        )
    return LocalObjects(path)


@contextlib.contextmanager
def _translating(key: str) -> Generator[None]:
    """What the file system refuses becomes what the protocol knows."""
    try:
        yield
    except RemoteUnavailableError:
        raise
    except (StorageError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(error, FileNotFoundError):
            raise
        if isinstance(cause, PermissionError):
            raise StorageError(
                f"the remote tier refuses access ({cause.strerror})",
                where=key,
                rule="the tier lists, reads, writes and deletes files below its directory",
                way_out="check the owner and the rights of the directory",
            ) from error
        raise RemoteUnavailableError(
            f"the remote tier failed ({error})",
            where=key,
            rule="what is shipped is on the disk of the tier before it counts",
            way_out="it is tried again; check that disk if it goes on",
        ) from error


def _files(root: Path) -> Iterator[Path]:
    """Every object below a directory."""
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _tag(data: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
