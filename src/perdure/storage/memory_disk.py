"""A disk in memory that remembers what would survive a loss of power.

Every file knows how many of its bytes were synced; every directory has the names as processes see
them and the names that are durable. Changes of names wait in one ordered list until each directory
they touch was synced. A crash keeps or drops each waiting change (:meth:`Disk.found`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


class PowerLost(BaseException):
    """The simulated machine lost power. Not an ``Exception``, so that no handler swallows it."""


@dataclass(eq=False, slots=True)
class FileNode:
    """An inode: ``data`` as processes see it, of which the first ``synced`` bytes are durable."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0
    write_ends: list[int] = field(default_factory=list[int])
    """Ends of the writes since the last sync."""


@dataclass(eq=False, slots=True)
class DirNode:
    """A directory: names as processes see them and as the disk would show them."""

    names: dict[str, Node] = field(default_factory=dict[str, "Node"])
    durable: dict[str, Node] = field(default_factory=dict[str, "Node"])


Node = FileNode | DirNode
Place = tuple[DirNode, str, Node]


@dataclass(eq=False, slots=True)
class NameChange:
    """A change of names that is atomic: ``gone`` and ``added`` take effect together.

    ``unsynced`` are the directories whose sync it still waits for.
    """

    added: Place | None
    gone: Place | None
    unsynced: set[DirNode]

    def applies(self, view: Mapping[DirNode, dict[str, Node]]) -> bool:
        """A rename or removal needs its source to be there."""
        return self.gone is None or view[self.gone[0]].get(self.gone[1]) is self.gone[2]

    def apply(self, view: Mapping[DirNode, dict[str, Node]]) -> None:
        if not self.applies(view):
            return
        if self.gone is not None:
            del view[self.gone[0]][self.gone[1]]
        if self.added is not None:
            view[self.added[0]][self.added[1]] = self.added[2]


@dataclass(frozen=True, slots=True)
class Operation:
    """One mutating operation of the journal."""

    kind: str
    path: str


class _DurableView(dict[DirNode, dict[str, Node]]):
    """Durable names by directory, copied when first touched."""

    def __missing__(self, directory: DirNode) -> dict[str, Node]:
        self[directory] = dict(directory.durable)
        return self[directory]


class _LiveView(dict[DirNode, dict[str, Node]]):
    """The durable names themselves."""

    def __missing__(self, directory: DirNode) -> dict[str, Node]:
        return directory.durable


class Disk:
    """Nodes, waiting changes of names, journal and locks, shared by all processes of a machine."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.Generator(np.random.Philox(key=seed))
        self.mutex = threading.RLock()
        self.root = DirNode()
        self.pending: list[NameChange] = []
        self.dirty: dict[FileNode, None] = {}
        self.journal: list[Operation] = []
        self.fail_after: int | None = None
        self.halted = False
        self.locks: dict[str, object] = {}
        self.temporaries = 0

    def begin(self, kind: str, path: str) -> None:
        """Enter a mutating operation in the journal, or lose power instead of starting it."""
        self.check_power()
        if self.fails_next():
            self.lose_power(kind, path)
        self.journal.append(Operation(kind, path))

    def check_power(self) -> None:
        if self.halted:
            raise PowerLost("the power is off")

    def fails_next(self) -> bool:
        """Whether the next mutating operation is the one at which the power goes."""
        return self.fail_after is not None and len(self.journal) >= self.fail_after

    def lose_power(self, kind: str, path: str) -> None:
        """Halt the machine for every process."""
        self.halted = True
        raise PowerLost(f"{kind} {path} (operation {len(self.journal) + 1})")

    def write(self, node: FileNode, data: bytes, path: str) -> None:
        """Append; the write at which the power goes leaves a random prefix (a torn write)."""
        self.check_power()
        if self.fails_next():
            self._append(node, data[: int(self.rng.integers(len(data) + 1))])
            self.lose_power("write", path)
        self.begin("write", path)
        self._append(node, data)

    def _append(self, node: FileNode, data: bytes) -> None:
        if data:
            node.data += data
            node.write_ends.append(len(node.data))
            self.dirty[node] = None

    def sync(self, node: FileNode, path: str) -> None:
        """Make every byte of a file durable (not its name)."""
        self.begin("sync", path)
        self._settle(node)

    def damage(self, node: FileNode, data: bytes) -> None:
        """Replace what is on the disk."""
        node.data[:] = data
        self._settle(node)

    def _settle(self, node: FileNode) -> None:
        node.synced = len(node.data)
        node.write_ends.clear()
        self.dirty.pop(node, None)

    def change_names(
        self, kind: str, path: str, *, added: Place | None = None, gone: Place | None = None
    ) -> None:
        """Change names as processes see them; durable once the directories are synced."""
        self.begin(kind, path)
        if gone is not None:
            del gone[0].names[gone[1]]
        if added is not None:
            added[0].names[added[1]] = added[2]
        touched = {place[0] for place in (added, gone) if place is not None}
        self.pending.append(NameChange(added, gone, touched))

    def sync_dir(self, directory: DirNode, path: str) -> None:
        """Make the names of one directory durable (not the directory's own name)."""
        self.begin("sync_dir", path)
        for change in self.pending:
            change.unsynced.discard(directory)
        self._settle_sources()
        while self.pending and not self.pending[0].unsynced:
            self.pending.pop(0).apply(_LiveView())

    def _settle_sources(self) -> None:
        """A durable rename of a node implies the changes that brought the node to its source."""
        sources: set[Place] = set()
        for change in reversed(self.pending):
            if change.added in sources:
                change.unsynced.clear()
            if not change.unsynced and change.gone is not None:
                sources.add(change.gone)

    def unsynced_files(self) -> list[FileNode]:
        """Files with bytes that a crash may lose, if any name could lead to them."""
        reachable = set(_nodes(self.root))
        reachable |= {change.added[2] for change in self.pending if change.added is not None}
        return [node for node in self.dirty if node in reachable]

    def unsynced_changes(self) -> list[NameChange]:
        """Changes of names that a crash may drop."""
        return [change for change in self.pending if change.unsynced]

    def found(
        self, kept: Sequence[NameChange], tails: Mapping[FileNode, bytes], *, seed: int
    ) -> Disk:
        """The disk after a loss of power.

        Args:
            kept: The unsynced changes of names that reached the disk.
            tails: For each file with unsynced bytes, what is found behind its synced ones.
            seed: Seed of the new disk.
        """
        view = _DurableView()
        chosen = set(kept)
        for change in self.pending:
            if not change.unsynced or change in chosen:
                change.apply(view)
        found = Disk(seed)
        found.temporaries = self.temporaries
        copies: dict[Node, Node] = {self.root: found.root}
        waiting = [self.root]
        while waiting:
            directory = waiting.pop()
            copy = copies[directory]
            assert isinstance(copy, DirNode)
            for name, node in view[directory].items():
                if node not in copies:
                    copies[node] = _found_node(node, tails)
                    if isinstance(node, DirNode):
                        waiting.append(node)
                copy.names[name] = copy.durable[name] = copies[node]
        return found

    def copy(self, *, seed: int) -> Disk:
        """Everything as it is, unsynced state included: what a killed process leaves behind."""
        copy = Disk(seed)
        copy.temporaries = self.temporaries
        copies: dict[Node, Node] = {self.root: copy.root}

        def twin(node: Node) -> Node:
            if node not in copies:
                copies[node] = (
                    FileNode(bytearray(node.data), node.synced, list(node.write_ends))
                    if isinstance(node, FileNode)
                    else DirNode()
                )
                waiting.append(node)
            return copies[node]

        def twin_place(place: Place | None) -> Place | None:
            if place is None:
                return None
            directory = twin(place[0])
            assert isinstance(directory, DirNode)
            return directory, place[1], twin(place[2])

        waiting: list[Node] = [self.root]
        for change in self.pending:
            unsynced = {twin(directory) for directory in change.unsynced}
            copy.pending.append(
                NameChange(
                    twin_place(change.added),
                    twin_place(change.gone),
                    {node for node in unsynced if isinstance(node, DirNode)},
                )
            )
        while waiting:
            node = waiting.pop()
            node_copy = copies[node]
            if isinstance(node, DirNode) and isinstance(node_copy, DirNode):
                node_copy.names = {name: twin(child) for name, child in node.names.items()}
                node_copy.durable = {name: twin(child) for name, child in node.durable.items()}
        dirty = [copies[node] for node in self.dirty if node in copies]
        copy.dirty = {node: None for node in dirty if isinstance(node, FileNode)}
        return copy


def _found_node(node: Node, tails: Mapping[FileNode, bytes]) -> Node:
    if isinstance(node, DirNode):
        return DirNode()
    data = node.data[: node.synced] + tails.get(node, b"")
    return FileNode(data, len(data))


def _nodes(root: DirNode) -> Iterator[Node]:
    """Every node that some name leads to, now or durably."""
    seen: set[Node] = set()
    waiting: list[Node] = [root]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if isinstance(node, DirNode):
            waiting += [*node.names.values(), *node.durable.values()]


def walk(prefix: str, directory: DirNode) -> Iterator[tuple[str, bytes]]:
    """Paths and bytes of every file below ``directory``, as processes see them."""
    for name, node in sorted(directory.names.items()):
        if isinstance(node, FileNode):
            yield prefix + name, bytes(node.data)
        else:
            yield from walk(f"{prefix}{name}/", node)
