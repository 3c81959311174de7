"""Where episodes begin, so that one that was cut at the front goes as a whole."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from perdure.checkpoint.segments.format import Array


class Episodes:
    """Numbers of the first rows of the episodes that are there, ascending.

    Args:
        starts: The beginnings.
        last: The last row's value of the episode column; None if there is no row.
    """

    def __init__(self, starts: Array | None = None, last: int | None = None) -> None:
        self._starts: list[int] = [] if starts is None else [int(row) for row in starts]
        self._gone = 0
        self.last = last

    def append(self, first: int, values: Array) -> None:
        """Rows from number ``first`` on have these values of the episode column."""
        if not len(values):
            return
        changed = np.empty(len(values), np.bool_)
        changed[0] = self.last is None or int(values[0]) != self.last
        changed[1:] = values[1:] != values[:-1]
        self._starts += (np.flatnonzero(changed) + first).tolist()
        self.last = int(values[-1])

    def next_start(self, row: int, total: int) -> int:
        """The first beginning of an episode at or after ``row``; ``total`` if there is none."""
        place = bisect.bisect_left(self._starts, row, self._gone)
        return self._starts[place] if place < len(self._starts) else total

    def forget(self, head: int, total: int) -> int:
        """Drop the beginnings before ``head``; returns where the first whole episode begins."""
        self._gone = bisect.bisect_left(self._starts, head, self._gone)
        if 2 * self._gone > len(self._starts):
            del self._starts[: self._gone]
            self._gone = 0
        return self.next_start(head, total)

    def starts_from(self, head: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The beginnings from ``head`` on."""
        place = bisect.bisect_left(self._starts, head, self._gone)
        return np.array(self._starts[place:], np.int64)
