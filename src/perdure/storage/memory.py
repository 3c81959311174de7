"""Storage in memory with a model of power loss, for tests and simulation.

Mutating steps are counted: an atomic write is five of them (create, write, sync, rename, sync_dir).
With ``fail_after = k`` the machine loses power at step k + 1, and a write at that step is torn.
Then :meth:`MemoryStorage.crash` and :meth:`MemoryStorage.crash_states` show what may be found after
the loss of power, :meth:`MemoryStorage.process_kill` what a killed process leaves behind.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from perdure.storage.memory_disk import DirNode, Disk, FileNode, Node, Operation, PowerLost, walk
from perdure.storage.power_loss import CrashMode, PowerLoss
from perdure.storage.refusals import (
    TEMPORARY_PREFIX,
    is_temporary,
    refusal,
    relative_parts,
    temporary_name,
)


class MemoryStorage:
    """A :class:`~perdure.core.storage_api.Storage` in memory. Thread-safe.

    Several handles may share one disk, each standing for a process of its own
    (:meth:`open_as_new_process`); locks are held by a handle.

    Args:
        seed: Seeds torn writes and random crashes.
    """

    def __init__(self, seed: int = 0) -> None:
        self._disk = Disk(seed)
        self._dead = False

    @property
    def operations(self) -> int:
        """Mutating steps completed so far by all processes."""
        return len(self._disk.journal)

    @property
    def journal(self) -> tuple[Operation, ...]:
        """The mutating steps completed so far, in order."""
        return tuple(self._disk.journal)

    @property
    def fail_after(self) -> int | None:
        """Number of mutating steps that complete before the power goes; None: it stays on."""
        return self._disk.fail_after

    @fail_after.setter
    def fail_after(self, steps: int | None) -> None:
        self._disk.fail_after = steps

    def open_as_new_process(self) -> MemoryStorage:
        """Another process on the same machine: same files, own locks."""
        return self._on(self._disk)

    def die(self) -> None:
        """Kill the process of this handle: its locks fall, its later calls raise PowerLost."""
        with self._disk.mutex:
            self._dead = True
            for path in [path for path, owner in self._disk.locks.items() if owner is self]:
                del self._disk.locks[path]

    def process_kill(self) -> MemoryStorage:
        """A copy after all processes were killed: written bytes and names are there, no locks."""
        with self._disk.mutex:
            return self._on(self._disk.copy(seed=int(self._disk.rng.integers(2**63))))

    def crash(
        self, mode: CrashMode = CrashMode.RANDOM, *, seed: int | None = None
    ) -> MemoryStorage:
        """A copy as found after a loss of power; this storage is left as it is.

        Args:
            mode: What happens to everything that was not synced.
            seed: Seeds random choices; None draws on from the storage's own seed.
        """
        with self._disk.mutex:
            loss = PowerLoss(self._disk, self._crash_rng(seed))
            return self._on(loss.found(loss.choose(mode)))

    def crash_states(self) -> Iterator[MemoryStorage]:
        """Copies for a bounded set of extreme outcomes of a loss of power, for exhaustive tests.

        Nothing kept, everything kept, every single unsynced change of names dropped, kept alone or
        cut off behind, and for every unsynced file prefixes, torn ends, garbage and missing
        sectors. The storage must not be written while the generator runs.
        """
        with self._disk.mutex:
            loss = PowerLoss(self._disk, self._crash_rng(None))
        for choice in loss.extremes():
            yield self._on(loss.found(choice))

    def files(self) -> dict[str, bytes]:
        """Every file as processes see it, temporary ones included."""
        with self._disk.mutex:
            return dict(walk("", self._disk.root))

    def damage(self, path: str, data: bytes) -> None:
        """Replace a file's bytes behind everybody's back, durably; not a step of the journal."""
        with self._disk.mutex:
            self._disk.damage(self._file("damage", path), data)

    def make_dirs(self, path: str) -> None:
        with self._disk.mutex:
            self._check()
            directory = self._disk.root
            for depth, name in enumerate(parts := relative_parts(path)):
                child = directory.names.get(name)
                where = "/".join(parts[: depth + 1])
                if child is None:
                    child = DirNode()
                    self._disk.change_names("make_dir", where, added=(directory, name, child))
                if isinstance(child, FileNode):
                    raise refusal("create directory", where=path, error=_os_error(errno.ENOTDIR))
                self._disk.sync_dir(directory, "/".join(parts[:depth]))
                directory = child

    def create_append(self, path: str) -> MemoryAppendFile:
        with self._disk.mutex:
            node = self._create("create", path)
            self._sync_parent(path)
            return MemoryAppendFile(self, path, node)

    def write_atomic(self, path: str, data: bytes) -> None:
        with self._disk.mutex:
            temporary, node = self._write_temporary("write", path, data)
            directory, name = self._parent("write", path)
            if isinstance(directory.names.get(name), DirNode):
                raise refusal("write", where=path, error=_os_error(errno.EISDIR))
            self._disk.change_names(
                "rename", path, added=(directory, name, node), gone=(directory, temporary, node)
            )
            self._sync_parent(path)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        with self._disk.mutex:
            temporary, node = self._write_temporary("create", path, data)
            directory, name = self._parent("create", path)
            created = name not in directory.names
            if created:
                self._disk.change_names("link", path, added=(directory, name, node))
            self._disk.change_names("remove", temporary, gone=(directory, temporary, node))
            self._sync_parent(path)
            return created

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._disk.mutex:
            data = self._file("read", path).data
            return bytes(data[offset:] if length is None else data[offset : offset + length])

    def map(self, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.read(path), np.uint8)

    def size(self, path: str) -> int:
        with self._disk.mutex:
            return len(self._file("stat", path).data)

    def exists(self, path: str) -> bool:
        with self._disk.mutex:
            self._check()
            return self._find(path) is not None

    def list(self, path: str) -> list[str]:
        with self._disk.mutex:
            self._check()
            node = self._find(path)
            if node is None:
                return []
            if isinstance(node, FileNode):
                raise refusal("list", where=path, error=_os_error(errno.ENOTDIR))
            return sorted(name for name in node.names if not name.startswith(TEMPORARY_PREFIX))

    def rename(self, source: str, target: str) -> None:
        with self._disk.mutex:
            self._check()
            node = self._find(source)
            parts = relative_parts(target)
            to = self._find("/".join(parts[:-1]))
            if node is None or not isinstance(to, DirNode):
                raise _absent(source if node is None else target)
            self._check_rename(node, source=source, target=target)
            directory, name = self._parent("rename", source)
            if self._find(target) is not node:
                self._disk.change_names(
                    "rename", target, added=(to, parts[-1], node), gone=(directory, name, node)
                )

    def remove(self, path: str) -> None:
        with self._disk.mutex:
            self._check()
            node = self._find(path)
            if node is not None:
                directory, name = self._parent("remove", path)
                self._remove(path, node, directory, name)

    def collect_temporaries(self, path: str) -> int:
        with self._disk.mutex:
            self._check()
            # Whoever writes one holds the mutex, so all of these were left behind.
            node = self._find(path)
            if not isinstance(node, DirNode):
                return 0
            left = [name for name in node.names if is_temporary(name)]
            for name in left:
                self._remove(f"{path}/{name}", node.names[name], node, name)
            return len(left)

    def sync_file(self, path: str) -> None:
        with self._disk.mutex:
            self._disk.sync(self._file("sync", path), path)

    def sync_dir(self, path: str) -> None:
        with self._disk.mutex:
            self._check()
            node = self._find(path)
            if node is None:
                raise _absent(path)
            if isinstance(node, FileNode):
                raise refusal("sync directory", where=path, error=_os_error(errno.ENOTDIR))
            self._disk.sync_dir(node, path)

    def lock(self, path: str) -> MemoryLock | None:
        with self._disk.mutex:
            self._check()
            if self._find(path) is None:
                self._create("create", path)
            self._file("lock", path)
            name = "/".join(relative_parts(path))
            if name in self._disk.locks:
                return None
            self._disk.locks[name] = self
            return MemoryLock(self, name)

    def append_to(self, node: FileNode, data: bytes, path: str) -> None:
        """Append to an open file (its name may be gone)."""
        with self._disk.mutex:
            self._check()
            self._disk.write(node, data, path)

    def sync_node(self, node: FileNode, path: str) -> None:
        """Sync an open file."""
        with self._disk.mutex:
            self._check()
            self._disk.sync(node, path)

    def unlock(self, name: str) -> None:
        """Give up a lock of this handle."""
        with self._disk.mutex:
            if self._disk.locks.get(name) is self:
                del self._disk.locks[name]

    def _on(self, disk: Disk) -> MemoryStorage:
        handle = MemoryStorage.__new__(MemoryStorage)
        handle._disk = disk
        handle._dead = False
        return handle

    def _crash_rng(self, seed: int | None) -> np.random.Generator:
        key = int(self._disk.rng.integers(2**63)) if seed is None else seed
        return np.random.Generator(np.random.Philox(key=key))

    def _check(self) -> None:
        self._disk.check_power()
        if self._dead:
            raise PowerLost("the process was killed")

    def _find(self, path: str) -> Node | None:
        node: Node | None = self._disk.root
        for name in relative_parts(path):
            node = node.names.get(name) if isinstance(node, DirNode) else None
        return node

    def _file(self, action: str, path: str) -> FileNode:
        self._check()
        node = self._find(path)
        if node is None:
            raise _absent(path)
        if isinstance(node, DirNode):
            raise refusal(action, where=path, error=_os_error(errno.EISDIR))
        return node

    def _parent(self, action: str, path: str) -> tuple[DirNode, str]:
        parts = relative_parts(path)
        if not parts:
            raise refusal(action, where=path, error=_os_error(errno.EISDIR))
        parent = self._find("/".join(parts[:-1]))
        if not isinstance(parent, DirNode):
            number = errno.ENOENT if parent is None else errno.ENOTDIR
            raise refusal(action, where=path, error=_os_error(number))
        return parent, parts[-1]

    def _sync_parent(self, path: str) -> None:
        directory, _ = self._parent("sync", path)
        self._disk.sync_dir(directory, "/".join(relative_parts(path)[:-1]))

    def _create(self, action: str, path: str) -> FileNode:
        self._check()
        directory, name = self._parent(action, path)
        if name in directory.names:
            raise FileExistsError(errno.EEXIST, "file exists", path)
        node = FileNode()
        self._disk.change_names("create", path, added=(directory, name, node))
        return node

    def _write_temporary(self, action: str, path: str, data: bytes) -> tuple[str, FileNode]:
        self._check()
        directory, name = self._parent(action, path)
        self._disk.temporaries += 1
        temporary = temporary_name(self._disk.temporaries, name)
        node = FileNode()
        self._disk.change_names("create", temporary, added=(directory, temporary, node))
        self._disk.write(node, data, temporary)
        self._disk.sync(node, temporary)
        return temporary, node

    def _check_rename(self, node: Node, *, source: str, target: str) -> None:
        """The rules of rename(2) about what may replace what."""
        from_parts, to_parts = relative_parts(source), relative_parts(target)
        replaced = self._find(target)
        number = 0
        if isinstance(node, DirNode):
            if to_parts[: len(from_parts)] == from_parts and to_parts != from_parts:
                number = errno.EINVAL
            elif isinstance(replaced, FileNode):
                number = errno.ENOTDIR
            elif replaced is not None and replaced is not node and replaced.names:
                number = errno.ENOTEMPTY
        elif isinstance(replaced, DirNode):
            number = errno.EISDIR
        if number:
            raise refusal("rename", where=source, error=_os_error(number))

    def _remove(self, path: str, node: Node, directory: DirNode, name: str) -> None:
        if isinstance(node, DirNode):
            for child in sorted(node.names):
                self._remove(f"{path}/{child}", node.names[child], node, child)
        self._disk.change_names("remove", path, gone=(directory, name, node))


class MemoryAppendFile:
    """An open file of a :class:`MemoryStorage`."""

    def __init__(self, storage: MemoryStorage, path: str, node: FileNode) -> None:
        self._storage = storage
        self._node = node
        self._path = path
        self._size = 0
        self._closed = False

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return self._size

    def append(self, pieces: Iterable[bytes | memoryview]) -> int:
        assert not self._closed
        data = b"".join(pieces)
        offset = self._size
        self._storage.append_to(self._node, data, self._path)
        self._size += len(data)
        return offset

    def sync(self) -> None:
        assert not self._closed
        self._storage.sync_node(self._node, self._path)

    def close(self) -> None:
        self._closed = True


class MemoryLock:
    """A lock held by one handle."""

    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name

    def release(self) -> None:
        self._storage.unlock(self._name)


def _os_error(number: int) -> OSError:
    return OSError(number, "")


def _absent(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such file or directory", path)
