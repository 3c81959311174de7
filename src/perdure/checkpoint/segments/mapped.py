"""A segment whose rows lie in its file: mapped when touched, every block checked before use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import xxhash

from perdure.checkpoint.files import FileProblem
from perdure.checkpoint.segments.format import (
    HEAD_BYTES,
    Array,
    Bytes,
    ColumnPlace,
    SegmentIndex,
    block_checksum,
    decode_index,
    index_bytes,
)
from perdure.core.components import StoredSegment
from perdure.core.errors import DamagedError, StorageError
from perdure.core.storage_api import Prefetching, Storage

MAX_MAPPED = 256
"""Files mapped at a time; each mapping holds a file descriptor."""

OnDamage = Callable[[StoredSegment, str], None]
"""Told which segment is damaged and how, before the error is raised."""


class Mappings:
    """The most recently used files, mapped."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._mapped: OrderedDict[str, Bytes] = OrderedDict()

    def get(self, path: str) -> Bytes:
        """The bytes of a file. Raises ``FileNotFoundError``, ``StorageError``."""
        data = self._mapped.get(path)
        if data is None:
            data = self._mapped[path] = self.storage.map(path)
            if len(self._mapped) > MAX_MAPPED:
                self._mapped.popitem(last=False)
        else:
            self._mapped.move_to_end(path)
        return data


class MappedSegment:
    """Rows of a stored segment. Not thread-safe.

    Args:
        stored: What the manifest says about it.
        index: Its index, checked against ``stored``.
        mappings: Shared by the segments of one storage.
        on_damage: Called before ``DamagedError`` is raised.
    """

    def __init__(
        self,
        stored: StoredSegment,
        index: SegmentIndex,
        mappings: Mappings,
        on_damage: OnDamage | None = None,
    ) -> None:
        self.stored: StoredSegment | None = stored
        self._file = stored
        self._index = index
        self._mappings = mappings
        self._on_damage = on_damage
        self._unseen = {
            name: np.ones(len(place.blocks), np.bool_) for name, place in index.columns.items()
        }
        self._left = {name: len(place.blocks) for name, place in index.columns.items()}

    @property
    def first(self) -> int:
        return self._index.first

    @property
    def rows(self) -> int:
        return self._index.rows

    @property
    def columns(self) -> Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        return {place.name: (place.dtype, place.shape) for place in self._index.columns.values()}

    def view(self, column: str, start: int, stop: int) -> Array:
        data = self._data(column)
        place = self._index.columns[column]
        if self._left[column] and start < stop and place.row_bytes:
            first = start * place.row_bytes // self._index.block_bytes
            last = (stop * place.row_bytes - 1) // self._index.block_bytes
            self._check(place, data, np.arange(first, last + 1))
        return self._rows(place, data)[start:stop]

    def take(self, column: str, rows: Array) -> Array:
        data = self._data(column)
        place = self._index.columns[column]
        if self._left[column] and len(rows) and place.row_bytes:
            self._check(place, data, _blocks(rows, place.row_bytes, self._index.block_bytes))
        return self._rows(place, data)[rows]

    def fetch_ahead(self, rows: Array) -> None:
        """Have the storage begin to read what :meth:`take` will want of every column."""
        storage = self._mappings.storage
        if not isinstance(storage, Prefetching) or not any(self._left.values()):
            return
        ranges: list[tuple[int, int]] = []
        for place in self._index.columns.values():
            if self._left[place.name] and place.row_bytes:
                blocks = _blocks(rows, place.row_bytes, self._index.block_bytes)
                wanted = blocks[self._unseen[place.name][blocks]]
                ranges += self._ranges(place, wanted)
        storage.prefetch(self._file.path, ranges)

    def _ranges(self, place: ColumnPlace, blocks: Array) -> list[tuple[int, int]]:
        """Where blocks lie in the file, neighbours together."""
        size, start = self._index.block_bytes, self._index.bytes + place.offset
        end = start + self.rows * place.row_bytes
        runs = np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1)
        return [
            (start + int(run[0]) * size, min(end, start + (int(run[-1]) + 1) * size))
            for run in runs
            if len(run)
        ]

    def _data(self, column: str) -> Bytes:
        place = self._index.columns[column]
        try:
            file = self._mappings.get(self._file.path)
        except FileNotFoundError:
            self._refuse("missing")
        if file.nbytes != self._file.bytes:
            self._refuse(f"{file.nbytes} bytes, expected {self._file.bytes}")
        start = self._index.bytes + place.offset
        return file[start : start + self.rows * place.row_bytes]

    def _rows(self, place: ColumnPlace, data: Bytes) -> Array:
        return data.view(place.dtype).reshape(self.rows, *place.shape)

    def _check(self, place: ColumnPlace, data: Bytes, blocks: Array) -> None:
        unseen = self._unseen[place.name]
        size = self._index.block_bytes
        for block in blocks[unseen[blocks]].tolist():
            piece = data[block * size : (block + 1) * size].data
            if block_checksum(piece) != place.blocks[block]:
                self._refuse(f"block {block} of column {place.name} does not match its checksum")
            unseen[block] = False
            self._left[place.name] -= 1

    def _refuse(self, reason: str) -> NoReturn:
        if self._on_damage is not None:
            self._on_damage(self._file, reason)
        raise DamagedError(
            reason,
            where=self._file.path,
            rule="rows that were stored come back as they were, or not at all",
            way_out="resume again: a checkpoint without this file is used, or start it cold",
        )


def open_segment(
    stored: StoredSegment, *, component: str, mappings: Mappings, on_damage: OnDamage | None = None
) -> MappedSegment:
    """Open a segment without reading its rows.

    Raises:
        DamagedError: It is absent, its size or its index is wrong.
        StorageError: The storage refuses to read it.
    """
    index = read_index(mappings.storage, stored, component=component)
    if isinstance(index, SegmentIndex):
        return MappedSegment(stored, index, mappings, on_damage)
    if index.unreadable:
        raise StorageError(
            index.reason,
            where=stored.path,
            rule="what cannot be read is not taken for damaged",
            way_out="check the disk, then resume again",
        )
    raise DamagedError(
        index.reason,
        where=stored.path,
        rule="rows that were stored come back as they were, or not at all",
        way_out="use an earlier checkpoint, as a resume does: `perdure ckpt verify` says which are"
        " whole",
    )


def read_index(
    storage: Storage, stored: StoredSegment, *, component: str
) -> SegmentIndex | FileProblem:
    """The index of a segment, or what is wrong with the file: presence, size, index."""
    try:
        size = storage.size(stored.path)
        if size != stored.bytes:
            return FileProblem(stored.path, f"{size} bytes, expected {stored.bytes}")
        length = index_bytes(storage.read(stored.path, 0, HEAD_BYTES))
        data = storage.read(stored.path, 0, min(length, size))
        if xxhash.xxh3_128_hexdigest(data) != stored.index_checksum:
            return FileProblem(stored.path, "the index does not match its checksum")
        index = decode_index(data)
    except FileNotFoundError:
        return FileProblem(stored.path, "missing")
    except StorageError as error:
        return FileProblem(stored.path, error.what, unreadable=True)
    except ValueError as error:
        return FileProblem(stored.path, str(error))
    said = (index.component, index.first, index.rows, index.file_bytes)
    if said != (component, stored.first, stored.rows, stored.bytes):
        return FileProblem(stored.path, "belongs to other rows")
    return index


def _blocks(rows: Array, row_bytes: int, block_bytes: int) -> Array:
    """Numbers of the blocks that hold any byte of the rows."""
    start = rows.astype(np.int64) * row_bytes
    first, last = start // block_bytes, (start + row_bytes - 1) // block_bytes
    span = np.arange(int((last - first).max()) + 1)
    return np.unique(np.minimum(first[:, None] + span, last[:, None]))
