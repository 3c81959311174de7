"""What a loss of power may leave: choices over a disk's unsynced names and bytes.

Bytes reach a disk in sectors and in any order; a file's size may be on disk before its bytes are
(zeros), or point at blocks that held something else (garbage). Names may be on disk in any
combination. What was synced is always there.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from perdure.storage.memory_disk import Disk, FileNode, NameChange

_T = TypeVar("_T")

SECTOR_BYTES = 512
_SPREAD = 24


class CrashMode(enum.Enum):
    """What happens to everything that was not synced."""

    RANDOM = "random"
    NOTHING_KEPT = "nothing_kept"
    EVERYTHING_KEPT = "everything_kept"
    NAMES_KEPT = "names_kept"
    """New names lead to files without their unsynced bytes."""
    BYTES_KEPT = "bytes_kept"
    """Files have their bytes, but no unsynced name is there."""
    ZEROS = "zeros"
    """Names and sizes are there, unsynced bytes read as zero."""
    GARBAGE = "garbage"
    """Names and sizes are there, unsynced bytes are arbitrary."""


@dataclass(frozen=True, slots=True)
class CrashChoice:
    """One outcome.

    Attributes:
        kept: Indexes into the disk's unsynced changes of names: those that reached the disk.
        tails: For each of the disk's unsynced files, the bytes found behind its synced ones.
    """

    kept: frozenset[int]
    tails: tuple[bytes, ...]


class PowerLoss:
    """Chooses outcomes for one disk as it is now."""

    def __init__(self, disk: Disk, rng: np.random.Generator) -> None:
        self._disk = disk
        self._rng = rng
        self._changes: list[NameChange] = disk.unsynced_changes()
        self._files: list[FileNode] = disk.unsynced_files()
        self._all_names = frozenset(range(len(self._changes)))
        self._full = tuple(_unsynced(node) for node in self._files)
        self._empty = tuple(b"" for _ in self._files)

    def found(self, choice: CrashChoice) -> Disk:
        """The disk after this outcome."""
        kept = [self._changes[index] for index in sorted(choice.kept)]
        tails = dict(zip(self._files, choice.tails, strict=True))
        return self._disk.found(kept, tails, seed=int(self._rng.integers(2**63)))

    def choose(self, mode: CrashMode) -> CrashChoice:
        """The outcome of a mode."""
        match mode:
            case CrashMode.RANDOM:
                return self._random()
            case CrashMode.NOTHING_KEPT:
                return CrashChoice(frozenset(), self._empty)
            case CrashMode.EVERYTHING_KEPT:
                return CrashChoice(self._all_names, self._full)
            case CrashMode.NAMES_KEPT:
                return CrashChoice(self._all_names, self._empty)
            case CrashMode.BYTES_KEPT:
                return CrashChoice(frozenset(), self._full)
            case CrashMode.ZEROS:
                return CrashChoice(self._all_names, tuple(bytes(len(t)) for t in self._full))
            case CrashMode.GARBAGE:
                garbage = tuple(self._rng.bytes(len(tail)) for tail in self._full)
                return CrashChoice(self._all_names, garbage)

    def extremes(self) -> Iterator[CrashChoice]:
        """A bounded set of distinct outcomes: the modes, single drops, prefixes and holes."""
        seen: set[CrashChoice] = set()
        for choice in self._extremes():
            if choice not in seen:
                seen.add(choice)
                yield choice

    def _extremes(self) -> Iterator[CrashChoice]:
        for mode in CrashMode:
            yield self.choose(mode)
        for index in _spread(range(len(self._changes))):
            yield CrashChoice(self._all_names - {index}, self._full)
            yield CrashChoice(frozenset({index}), self._full)
            yield CrashChoice(frozenset(range(index)), self._full)
        for index, node in enumerate(self._files):
            for tail in self._extreme_tails(node):
                for others in (self._full, self._empty):
                    tails = (*others[:index], tail, *others[index + 1 :])
                    yield CrashChoice(self._all_names, tails)

    def _extreme_tails(self, node: FileNode) -> Iterator[bytes]:
        full = _unsynced(node)
        ends = [end - node.synced for end in node.write_ends]
        sectors = _sectors(node)
        cuts = {0, 1, len(full) // 2, len(full) - 1, len(full), *(stop for _, stop in sectors)}
        for cut in _spread(sorted(cuts)):
            yield full[:cut]
        for end in _spread(ends):
            yield full[:end]
            yield full[:end] + self._rng.bytes(len(full) - end)
        for start, stop in _spread(sectors):
            yield full[:start] + bytes(stop - start) + full[stop:]

    def _random(self) -> CrashChoice:
        kept = self._rng.random(len(self._changes)) < self._rng.random()
        names = frozenset(int(index) for index in np.flatnonzero(kept))
        return CrashChoice(names, tuple(self._random_tail(node) for node in self._files))

    def _random_tail(self, node: FileNode) -> bytes:
        full = _unsynced(node)
        cut = int(self._rng.integers(len(full) + 1))
        match int(self._rng.integers(6)):
            case 0:
                return b""
            case 1:
                return full
            case 2:
                return full[:cut]
            case 3:
                return full[:cut] + bytes(len(full) - cut)
            case 4:
                return full[:cut] + self._rng.bytes(len(full) - cut)
            case _:
                return self._random_sectors(node, full)

    def _random_sectors(self, node: FileNode, full: bytes) -> bytes:
        pieces: list[bytes] = []
        for start, stop in _sectors(node):
            match int(self._rng.integers(4)):
                case 0:
                    pieces.append(bytes(stop - start))
                case 1:
                    pieces.append(self._rng.bytes(stop - start))
                case _:
                    pieces.append(full[start:stop])
        return b"".join(pieces[: int(self._rng.integers(len(pieces) + 1))])


def _unsynced(node: FileNode) -> bytes:
    return bytes(node.data[node.synced :])


def _sectors(node: FileNode) -> list[tuple[int, int]]:
    """Sectors of the unsynced bytes as (start, stop), counted from the first unsynced byte."""
    inner = range((node.synced // SECTOR_BYTES + 1) * SECTOR_BYTES, len(node.data), SECTOR_BYTES)
    edges = [node.synced, *inner, len(node.data)]
    return [
        (start - node.synced, stop - node.synced)
        for start, stop in itertools.pairwise(edges)
        if stop > start
    ]


def _spread(items: Sequence[_T]) -> list[_T]:
    """At most ``_SPREAD`` of the items, first and last included, evenly spaced."""
    if len(items) <= _SPREAD:
        return list(items)
    return [items[round(k * (len(items) - 1) / (_SPREAD - 1))] for k in range(_SPREAD)]
