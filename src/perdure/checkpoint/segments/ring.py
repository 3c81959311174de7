"""Replay: a ring of rows over segments that never change, for off-policy learning.

Rows are numbered from 0 in the order they were appended and keep their numbers for ever: those from
``head`` to ``total`` are there. What was appended since the last checkpoint becomes a segment at
the next one, so every row is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure.checkpoint.segments.columns import Columns
from perdure.checkpoint.segments.episodes import Episodes
from perdure.checkpoint.segments.format import Array
from perdure.checkpoint.segments.mapped import MappedSegment
from perdure.checkpoint.segments.memory import MemorySegment, SegmentMemory
from perdure.checkpoint.segments.trim import KEEP_ALL, Trim
from perdure.core.components import ComponentState, Segment
from perdure.core.errors import ConfigError

SEGMENT_BYTES = 32 << 20
MAX_PIECES = 64
"""So many pieces that checkpoints have cut out of one stretch are stored again, as one."""


@dataclass(frozen=True, slots=True)
class RingOptions:
    """Bounds of a ring.

    Attributes:
        segment_bytes: Rows of at most so many bytes share a segment.
        episode: Column whose value changes where an episode begins. An episode that loses its
            first row then goes as a whole.
        save: What a checkpoint keeps of the rows that are there.
        restore: What is kept of the rows that a checkpoint holds.
    """

    segment_bytes: int = SEGMENT_BYTES
    episode: str | None = None
    save: Trim = KEEP_ALL
    restore: Trim = KEEP_ALL


@dataclass(slots=True)
class _Open:
    """Memory that is being filled: rows ``first`` … ``first + filled``, sealed up to ``sealed``."""

    first: int
    memory: SegmentMemory
    filled: int = 0
    sealed: int = 0
    pieces: int = 0
    """Segments made of it so far."""
    joined: int = 0
    """Rows up to here were joined; the pieces behind them were not."""
    loose: int = 0
    """How many those are."""

    def slice(self, start: int, stop: int) -> MemorySegment:
        arrays = {name: array[start:stop] for name, array in self.memory.arrays.items()}
        return MemorySegment(self.first + start, arrays, self.memory)


class ReplayRing:
    """The newest ``capacity`` rows. One thread appends, samples and stages.

    Args:
        capacity: Rows kept; older ones are overwritten.
        columns: Name → element type and shape of one row.
        options: Bounds.

    Raises:
        ConfigError: No room, no column, or a type that cannot be stored.
    """

    schema_version = 1

    def __init__(
        self,
        capacity: int,
        columns: Mapping[str, tuple[Any, tuple[int, ...]]],
        *,
        options: RingOptions | None = None,
    ) -> None:
        if capacity < 1:
            raise ConfigError(
                f"is {capacity}", where="capacity", rule="at least 1", way_out="raise it"
            )
        self.capacity = capacity
        self.options = RingOptions() if options is None else options
        self.columns = Columns(columns)
        for name in (self.options.episode, self.options.save.column, self.options.restore.column):
            if name is not None:
                self.columns.require_number(name)
        self._segment_rows = max(
            1, min(capacity, self.options.segment_bytes // max(1, self.columns.row_bytes))
        )
        self._episodes = Episodes() if self.options.episode is not None else None
        self._clear(0)

    @property
    def head(self) -> int:
        """Number of the oldest row that is there."""
        return self._head

    @property
    def total(self) -> int:
        """Rows ever appended, restarts included; the number of the next row."""
        return self._total

    def __len__(self) -> int:
        return self._total - self._head

    @property
    def full(self) -> bool:
        return len(self) == self.capacity

    def append(self, batch: Mapping[str, Any]) -> None:
        """Copy rows to the end; the oldest beyond ``capacity`` go.

        Args:
            batch: Column → array of shape (rows, …), the same number of rows each.

        Raises:
            ConfigError: Columns, shapes or types differ; nothing was appended.
        """
        arrays, count = self.columns.rows_of(batch)
        if self._episodes is not None:
            self._episodes.append(self._total, arrays[self.options.episode or ""])
        skipped = max(0, count - self.capacity)
        if skipped:
            self._reset_rows(self._total + skipped)
        done = skipped
        while done < count:
            done += self._fill(arrays, done, count)
        self._forget(self._total - self.capacity)

    def sample(self, rng: np.random.Generator, count: int) -> dict[str, Array]:
        """Copies of ``count`` rows drawn uniformly, with replacement.

        The draw depends on the generator, ``head`` and ``total`` alone.

        Raises:
            ConfigError: There are no rows.
            DamagedError: Stored bytes are wrong; they are checked before they are first used.
        """
        return self.rows(self.draw(rng, count))

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Numbers of ``count`` rows, uniform, with replacement."""
        if not len(self):
            raise ConfigError(
                "there are no rows to draw from",
                where="replay",
                rule="sampling begins when enough rows are there",
                way_out="wait until is_warm(…)",
            )
        return rng.integers(self._head, self._total, count)

    def rows(self, numbers: Array) -> dict[str, Array]:
        """Copies of the rows with these numbers, each from ``head`` to ``total``.

        Raises:
            ConfigError: One of them is not there, or no longer.
            DamagedError: Stored bytes are wrong.
        """
        numbers = np.asarray(numbers, np.int64)
        if numbers.size and not self._head <= numbers.min() <= numbers.max() < self._total:
            raise ConfigError(
                f"rows {numbers.min()} to {numbers.max()} were asked for",
                where="replay",
                rule=f"rows {self._head} to {self._total - 1} are there; older ones are gone",
                way_out="use the numbers of a draw before more rows are appended",
            )
        out = {name: np.empty((len(numbers), *shape), t) for name, t, shape in self.columns}
        segments = self._all_segments()
        starts = np.array([segment.first for segment in segments], np.int64)
        owner = np.searchsorted(starts, numbers, side="right") - 1
        order = np.argsort(owner, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(owner[order])) + 1) if len(order) else []
        found = [(segments[int(owner[places[0]])], places) for places in groups]
        for segment, places in found:
            if isinstance(segment, MappedSegment):
                segment.fetch_ahead(numbers[places] - segment.first)
        for segment, places in found:
            inside = numbers[places] - segment.first
            for name, target in out.items():
                target[places] = segment.take(name, inside)
        return out

    def blocks(self) -> Iterator[dict[str, Array]]:
        """All rows from the oldest on, without copying, a stretch at a time; not to be changed."""
        for segment in self._all_segments():
            start = max(0, self._head - segment.first)
            yield {name: segment.view(name, start, segment.rows) for name, _, _ in self.columns}

    def count(self, column: str | None = None) -> int:
        """Rows that are there, or those of them whose value in ``column`` is true."""
        if column is None:
            return len(self)
        self.columns.require(column)
        return sum(int(np.count_nonzero(block[column])) for block in self.blocks())

    def is_warm(self, rows: int, *, valid: str | None = None) -> bool:
        """Whether there is enough to learn from: rows that are there, not rows ever seen.

        Args:
            rows: How many are needed.
            valid: Column that says which rows count; None = all.
        """
        return len(self) >= rows and (valid is None or self.count(valid) >= rows)

    def trim(self, keep: Trim) -> None:
        """Drop rows, oldest first."""
        if keep.column is not None:
            self.columns.require_number(keep.column)
        self._forget(self._trimmed(keep))

    def state(self) -> ComponentState:
        head = self._kept_from(self._trimmed(self.options.save))
        values = {"head": head, "total": self._total, "columns": self.columns.described()}
        if self._episodes is None:
            return ComponentState(values=values)
        return ComponentState(
            tensors={"episodes": self._episodes.starts_from(head)},
            values={**values, "last_episode": self._episodes.last},
        )

    def segments(self) -> Sequence[Segment]:
        """Seal what is new; the rows a checkpoint keeps, in order."""
        self._seal()
        head = self._kept_from(self._trimmed(self.options.save))
        return [one for one in self._sealed if one.first + one.rows > head]

    def sealed(self) -> Sequence[Segment]:
        """Full segments and what earlier checkpoints sealed."""
        return tuple(self._sealed)

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the numbers over; the rows follow with :meth:`load_segments`.

        Raises:
            ValueError: Other columns or another schema version; nothing was changed.
        """
        if schema_version != self.schema_version:
            raise ValueError(f"schema version {schema_version}, expected {self.schema_version}")
        if state.values["columns"] != self.columns.described():
            raise ValueError(
                f"columns are {state.values['columns']}, expected {self.columns.described()}"
            )
        if self._episodes is not None:
            if "episodes" not in state.tensors:
                raise ValueError("missing: where episodes begin")
            last = state.values["last_episode"]
            self._episodes = Episodes(state.tensors["episodes"], last)
        self._clear(int(state.values["total"]))
        self._head = int(state.values["head"])

    def load_segments(self, segments: Sequence[Segment] | None) -> None:
        """Replace the rows by those of the segments; None: none, the count goes on.

        Raises:
            ValueError: They are not the rows from ``head`` to ``total``.
        """
        if segments is None:
            self._reset_rows(self._total)
            return
        if not _covers(segments, self._head, self._total):
            raise ValueError(f"segments do not hold rows {self._head} to {self._total}")
        if any(dict(one.columns) != self.columns.types() for one in segments):
            raise ValueError("a segment holds other columns")
        self._sealed = list(segments)
        self._forget(max(self._total - self.capacity, self._trimmed(self.options.restore)))

    def _clear(self, total: int) -> None:
        self._total = total
        self._head = total
        self._sealed: list[Segment] = []
        self._open: _Open | None = None

    def _reset_rows(self, total: int) -> None:
        self._clear(total)
        if self._episodes is not None:
            self._head = self._episodes.forget(total, total)

    def _fill(self, arrays: Mapping[str, Array], done: int, count: int) -> int:
        """Copy what fits into the open memory; returns how many rows."""
        if self._open is None:
            memory = SegmentMemory(self._segment_rows, self.columns.types())
            self._open = _Open(self._total, memory)
        target = self._open
        rows = min(count - done, self._segment_rows - target.filled)
        for name, array in arrays.items():
            target.memory.arrays[name][target.filled : target.filled + rows] = array[
                done : done + rows
            ]
        target.filled += rows
        self._total += rows
        if target.filled == self._segment_rows:
            self._seal()
            self._close(target)
        return rows

    def _seal(self) -> None:
        """Make a segment of the rows that are in none yet."""
        target = self._open
        if target is None:
            return
        start = max(target.sealed, self._head - target.first)
        if start < target.filled:
            self._sealed.append(target.slice(start, target.filled))
            target.pieces += 1
            target.loose += 1
        target.sealed = target.filled
        if target.loose >= MAX_PIECES:
            self._join(target, target.joined)
            target.pieces -= target.loose - 1
            target.joined, target.loose = target.filled, 0

    def _close(self, target: _Open) -> None:
        if target.pieces > MAX_PIECES:
            self._join(target, 0)
        self._open = None

    def _join(self, target: _Open, start: int) -> None:
        """Put one segment in the place of the pieces from row ``start`` of the memory on."""
        older = [one for one in self._sealed if one.first < target.first + start]
        self._sealed = [*older, target.slice(start, target.filled)]

    def _all_segments(self) -> list[Segment]:
        segments: list[Segment] = list(self._sealed)
        target = self._open
        if target is not None:
            start = max(target.sealed, self._head - target.first)
            if start < target.filled:
                segments.append(target.slice(start, target.filled))
        return segments

    def _forget(self, head: int) -> None:
        """Drop the rows before ``head``, and the rest of an episode that is cut there."""
        self._head = max(self._head, self._kept_from(head))
        if self._episodes is not None:
            self._episodes.forget(self._head, self._total)
        gone = 0
        while gone < len(self._sealed) and _end(self._sealed[gone]) <= self._head:
            gone += 1
        del self._sealed[:gone]

    def _kept_from(self, head: int) -> int:
        head = max(self._head, head)
        return head if self._episodes is None else self._episodes.next_start(head, self._total)

    def _trimmed(self, keep: Trim) -> int:
        """Number of the first row that stays."""
        head = self._head
        if keep.rows is not None:
            head = max(head, self._total - keep.rows)
        if keep.column is None or keep.span is None or head >= self._total:
            return head
        least = self._value(keep.column, self._total - 1) - keep.span
        low, high = head, self._total - 1
        while low < high:
            middle = (low + high) // 2
            if self._value(keep.column, middle) < least:
                low = middle + 1
            else:
                high = middle
        return low

    def _value(self, column: str, number: int) -> Any:
        for segment in self._all_segments():
            inside = number - segment.first
            if 0 <= inside < segment.rows:
                return segment.view(column, inside, inside + 1)[0].item()
        raise AssertionError(f"row {number} is in no segment")


def _end(segment: Segment) -> int:
    return segment.first + segment.rows


def _covers(segments: Sequence[Segment], head: int, total: int) -> bool:
    """Whether the segments follow each other and hold the rows from ``head`` to ``total``."""
    if not segments:
        return head == total
    ends = [_end(one) for one in segments]
    starts = [one.first for one in segments]
    return starts[0] <= head < ends[0] and ends[-1] == total and starts[1:] == ends[:-1]
