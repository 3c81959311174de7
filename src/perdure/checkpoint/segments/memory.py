"""A segment whose rows lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perdure.checkpoint.segments.format import Array
from perdure.core.components import StoredSegment


@dataclass(eq=False, slots=True, weakref_slot=True)
class MemorySegment:
    """Rows that nobody writes to any more; the arrays are read-only views.

    Args:
        first: Number of the first row.
        arrays: Column → contiguous array of its rows, of a stored type.
    """

    first: int
    arrays: Mapping[str, Array]
    stored: StoredSegment | None = field(default=None, kw_only=True)
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(next(iter(self.arrays.values())))
        for array in self.arrays.values():
            array.flags.writeable = False

    @property
    def columns(self) -> Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        return {name: (array.dtype, array.shape[1:]) for name, array in self.arrays.items()}

    def view(self, column: str, start: int, stop: int) -> Array:
        return self.arrays[column][start:stop]

    def take(self, column: str, rows: Array) -> Array:
        return self.arrays[column][rows]
