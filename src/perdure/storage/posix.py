"""Storage on a POSIX file system with rename(2), link(2), fsync(2) and flock(2)."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from perdure.core.faults import FaultHook, FaultPoint, NoFaults
from perdure.storage.posix_lock import PosixLock, try_lock
from perdure.storage.refusals import (
    TEMPORARY_PREFIX,
    abandoned,
    is_temporary,
    refusal,
    relative_parts,
    temporary_name,
)

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FILE_MODE = 0o644


class PosixStorage:
    """A :class:`~perdure.core.storage_api.Storage` below one directory. Thread-safe.

    Args:
        root: The directory. ``make_dirs("")`` creates it.
        faults: Reached between the steps of atomic writes and exclusive creations.
    """

    def __init__(self, root: Path, *, faults: FaultHook | None = None) -> None:
        self._root = os.path.abspath(root)
        self._prefix = os.path.join(self._root, "")
        self._faults = NoFaults() if faults is None else faults
        self._durable: set[str] = set()
        """Directories whose names this object has synced."""

    @property
    def root(self) -> Path:
        return Path(self._root)

    def full(self, path: str) -> str:
        """Where a path of this storage lies on the disk."""
        parts = relative_parts(path)
        return self._prefix + "/".join(parts) if parts else self._root

    def make_dirs(self, path: str) -> None:
        with _refusing("create directory", path or self._root):
            self._make_root()
            directory = self._root
            for name in relative_parts(path):
                directory = os.path.join(directory, name)
                self._make_durable(directory)

    def create_append(self, path: str) -> PosixAppendFile:
        full = self.full(path)
        with _refusing("create", path, passing=FileExistsError):
            descriptor = os.open(full, _APPEND_FLAGS, _FILE_MODE)
            try:
                _sync_dir(os.path.dirname(full))
            except BaseException:
                os.close(descriptor)
                raise
        return PosixAppendFile(path, descriptor)

    def write_atomic(self, path: str, data: bytes) -> None:
        full = self.full(path)
        with _refusing("write", path), self._temporary(full, data) as temporary:
            os.rename(temporary, full)
            self._faults.reach(FaultPoint.STORAGE_RENAMED)
            _sync_dir(os.path.dirname(full))

    def create_exclusive(self, path: str, data: bytes) -> bool:
        full = self.full(path)
        created = True
        with _refusing("create", path):
            with self._temporary(full, data) as temporary:
                try:
                    os.link(temporary, full)
                except FileExistsError:
                    created = False
                self._faults.reach(FaultPoint.STORAGE_LINKED)
            _sync_dir(os.path.dirname(full))
        return created

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0
        with (
            _refusing("read", path, passing=FileNotFoundError),
            open(self.full(path), "rb") as file,
        ):
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def map(self, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        with (
            _refusing("map", path, passing=FileNotFoundError),
            open(self.full(path), "rb") as file,
        ):
            if os.fstat(file.fileno()).st_size == 0:
                return np.frombuffer(b"", np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError), open(self.full(path), "rb") as file:
            for start, end in ranges:
                os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)

    def size(self, path: str) -> int:
        with _refusing("stat", path, passing=FileNotFoundError):
            return os.stat(self.full(path)).st_size

    def exists(self, path: str) -> bool:
        with _refusing("stat", path):
            try:
                os.stat(self.full(path))
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def list(self, path: str) -> list[str]:
        with _refusing("list", path):
            try:
                names = os.listdir(self.full(path))
            except FileNotFoundError:
                return []
            return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def rename(self, source: str, target: str) -> None:
        with _refusing("rename", source, passing=FileNotFoundError):
            os.rename(self.full(source), self.full(target))
        self._forget(self.full(source))

    def remove(self, path: str) -> None:
        full = self.full(path)
        with _refusing("remove", path):
            if full == self._root:
                raise IsADirectoryError(errno.EISDIR, "the root", path)
            try:
                os.unlink(full)
            except (FileNotFoundError, NotADirectoryError):
                return
            except IsADirectoryError:
                self._forget(full)
                _remove_tree(full)

    def collect_temporaries(self, path: str) -> int:
        directory = self.full(path)
        with _refusing("remove temporary files", path or self._root):
            try:
                names = [name for name in os.listdir(directory) if is_temporary(name)]
            except FileNotFoundError:
                return 0
            return sum(_remove_if_abandoned(os.path.join(directory, name)) for name in names)

    def sync_file(self, path: str) -> None:
        with _refusing("sync", path, passing=FileNotFoundError):
            descriptor = os.open(self.full(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def sync_dir(self, path: str) -> None:
        with _refusing("sync directory", path, passing=FileNotFoundError):
            _sync_dir(self.full(path))

    def lock(self, path: str) -> PosixLock | None:
        with _refusing("lock", path):
            descriptor = _open_lock(self.full(path))
            try:
                locked = try_lock(descriptor)
            except OSError:
                os.close(descriptor)
                raise
            if not locked:
                os.close(descriptor)
                return None
        return PosixLock(descriptor)

    def _make_root(self) -> None:
        missing = [self._root]
        while not os.path.isdir(parent := os.path.dirname(missing[-1])):
            missing.append(parent)
        for directory in reversed(missing):
            self._make_durable(directory)

    def _make_durable(self, directory: str) -> None:
        made = _make_dir(directory)
        # Also, once, for an existing one: whoever made it may have died before this sync.
        if made or directory not in self._durable:
            self._durable.discard(directory)
            _sync_dir(os.path.dirname(directory))
            self._durable.add(directory)

    def _forget(self, full: str) -> None:
        """What is there from now on was made by somebody else."""
        below = full + os.sep
        gone = {one for one in self._durable if one == full or one.startswith(below)}
        self._durable -= gone

    @contextlib.contextmanager
    def _temporary(self, full: str, data: bytes) -> Generator[str]:
        """A durable temporary file beside ``full``; what is left of it in the end is removed."""
        temporary, descriptor = _create_temporary(full)
        try:
            _write(descriptor, [data])
            os.fdatasync(descriptor)
            self._faults.reach(FaultPoint.STORAGE_TEMPORARY_SYNCED)
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            os.close(descriptor)


class PosixAppendFile:
    """An open file that only grows."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = 0
        self._failed = False

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return self._size

    def append(self, pieces: Iterable[bytes | memoryview]) -> int:
        self._check()
        try:
            written = _write(self._descriptor, list(pieces))
        except OSError as error:
            self._failed = True
            raise refusal("append", where=self._path, error=error) from error
        offset = self._size
        self._size = offset + written
        return offset

    def sync(self) -> None:
        self._check()
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._failed = True
            raise refusal("sync", where=self._path, error=error) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _check(self) -> None:
        assert self._descriptor >= 0, "the file is closed"
        if self._failed:
            raise abandoned(self._path)


@contextlib.contextmanager
def _refusing(action: str, path: str, *, passing: type[OSError] | None = None) -> Generator[None]:
    """Turn an ``OSError`` into a ``StorageError``, except the one the contract lets through."""
    try:
        yield
    except OSError as error:
        if passing is not None and isinstance(error, passing):
            raise
        raise refusal(action, where=path, error=error) from error


def _create_temporary(full: str) -> tuple[str, int]:
    """Path and locked descriptor of a new temporary file beside ``full``.

    The lock says that its writer lives; it falls with the process.
    """
    directory, name = os.path.split(full)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        number = int.from_bytes(os.urandom(8), "big")
        temporary = os.path.join(directory, temporary_name(number, name))
        with contextlib.ExitStack() as stack:
            descriptor = os.open(temporary, flags, _FILE_MODE)
            stack.callback(os.close, descriptor)
            # Before it was locked, somebody may have taken it for one that was left behind.
            if try_lock(descriptor) and os.fstat(descriptor).st_nlink > 0:
                stack.pop_all()
                return temporary, descriptor


def _remove_if_abandoned(temporary: str) -> bool:
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(descriptor):
            return False
        # Gone under this name: its writer has just finished. Names are never used again.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
            return True
        return False
    finally:
        os.close(descriptor)


def _make_dir(directory: str) -> bool:
    """Whether it was not there yet."""
    try:
        os.mkdir(directory)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", directory) from None
        return False
    return True


def _sync_dir(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(directory: str) -> None:
    while os.path.lexists(directory):
        # Somebody else may be removing it too: what is gone is gone, the rest is still ours.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)


def _write(descriptor: int, pieces: list[bytes | memoryview]) -> int:
    """Write all pieces and return their bytes; the kernel may take fewer at a time."""
    total = 0
    for start in range(0, len(pieces), _IOV_MAX):
        batch = pieces[start : start + _IOV_MAX]
        expected = sum(memoryview(piece).nbytes for piece in batch)
        written = os.writev(descriptor, batch)
        while written < expected:
            written += os.writev(descriptor, _behind(batch, written))
        total += expected
    return total


def _behind(pieces: list[bytes | memoryview], offset: int) -> list[memoryview]:
    """What is left of the pieces behind their first ``offset`` bytes."""
    rest: list[memoryview] = []
    for piece in pieces:
        view = memoryview(piece).cast("B")
        rest.append(view[min(offset, view.nbytes) :])
        offset -= min(offset, view.nbytes)
    return rest


def _open_lock(path: str) -> int:
    """A descriptor to lock; one for reading will do where nothing can be written."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES) or not os.path.exists(path):
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
