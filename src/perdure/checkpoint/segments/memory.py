"""Segments whose rows lie in memory, where possible as they will lie in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from perdure.checkpoint.segments.format import Array, Bytes, aligned, index_room
from perdure.core.components import StoredSegment
from perdure.storage import bulk

ColumnTypes = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Name → element type and shape of one row."""


class SegmentMemory:
    """Room for the rows of one segment, laid out as its file is.

    A segment that fills it is written without being copied, whatever wrote the rows.

    Args:
        rows: How many.
        columns: Of stored types, in the order of the file.
    """

    def __init__(self, rows: int, columns: ColumnTypes) -> None:
        self._rows = rows
        self._start = index_room(columns, rows)
        size = self._start
        self._places: dict[str, int] = {}
        for name, (dtype, shape) in columns.items():
            self._places[name] = size
            size = aligned(size + rows * dtype.itemsize * int(np.prod(shape)))
        self._bytes: Bytes = np.frombuffer(bulk.huge_pages(size), np.uint8)
        self.arrays: dict[str, Array] = {
            name: self._bytes[self._places[name] :][: rows * dtype.itemsize * int(np.prod(shape))]
            .view(dtype)
            .reshape(rows, *shape)
            for name, (dtype, shape) in columns.items()
        }

    def image(self, index: bytes, arrays: Mapping[str, Array]) -> Bytes | None:
        """The file in whole blocks, once the index is put before the columns.

        Returns:
            None if these are not all the rows, or no longer lie here (in a copy of the object).
        """
        start = self._start - len(index)
        if start < 0 or list(arrays) != list(self._places):
            return None
        for name, place in self._places.items():
            if len(arrays[name]) != self._rows or _address(arrays[name]) != _address(
                self._bytes[place:]
            ):
                return None
        self._bytes[start : self._start] = np.frombuffer(index, np.uint8)
        return self._bytes[start:]


@runtime_checkable
class InSegmentMemory(Protocol):
    """A segment whose rows may lie as they will in the file."""

    memory: SegmentMemory | None


@dataclass(eq=False, slots=True, weakref_slot=True)
class MemorySegment:
    """Rows that nobody writes to any more; the arrays are read-only views.

    Args:
        first: Number of the first row.
        arrays: Column → contiguous array of its rows, of a stored type.
        memory: What they lie in.
    """

    first: int
    arrays: Mapping[str, Array]
    memory: SegmentMemory | None = None
    stored: StoredSegment | None = field(default=None, kw_only=True)
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(next(iter(self.arrays.values())))
        for array in self.arrays.values():
            array.flags.writeable = False

    @property
    def columns(self) -> ColumnTypes:
        return {name: (array.dtype, array.shape[1:]) for name, array in self.arrays.items()}

    def view(self, column: str, start: int, stop: int) -> Array:
        return self.arrays[column][start:stop]

    def take(self, column: str, rows: Array) -> Array:
        return self.arrays[column][rows]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
