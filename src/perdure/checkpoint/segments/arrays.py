"""Replay that another library keeps in flat arrays: only what changed is copied and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perdure.checkpoint.segments.columns import Columns
from perdure.checkpoint.segments.format import Array
from perdure.checkpoint.segments.memory import ColumnTypes, SegmentMemory
from perdure.checkpoint.segments.ring import SEGMENT_BYTES
from perdure.core.components import ComponentState, Segment, StoredSegment
from perdure.core.errors import ConfigError, StorageError


class ReplayArrays:
    """A ring in arrays of shape (capacity, …), as Stable-Baselines3 and others keep it.

    ``owner`` has the next slot to be written in one attribute and whether the ring is full in
    another; both are read when a checkpoint is taken and set when one is loaded. Rows are numbered
    in the order they were added; slot ``number % capacity`` holds a row.

    Args:
        arrays: Column → live array.
        owner: The object whose attributes ``pos`` and ``full`` name.
        pos: Attribute with the next slot.
        full: Attribute that says whether every slot holds a row.
        total: Rows ever added; restored with the run. Without it every checkpoint takes all rows,
            since ``pos`` alone cannot tell a whole turn of the ring from none; so does one at
            which the count disagrees with ``pos``.
        segment_bytes: Rows of at most so many bytes share a segment.

    Raises:
        ConfigError: Arrays of different length, or of a type that cannot be stored.
    """

    schema_version = 1

    def __init__(
        self,
        arrays: Mapping[str, Array],
        owner: object,
        *,
        pos: str = "pos",
        full: str = "full",
        total: Callable[[], int] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._arrays = dict(arrays)
        self._columns = Columns({name: (a.dtype, a.shape[1:]) for name, a in arrays.items()})
        lengths = {len(array) for array in arrays.values()}
        if len(lengths) != 1 or lengths == {0}:
            raise ConfigError(
                f"have lengths {sorted(lengths)}",
                where=", ".join(arrays),
                rule="every array has one place for each of the same rows",
                way_out="register arrays of different length apart",
            )
        self._capacity = lengths.pop()
        self._owner = owner
        self._names = (pos, full)
        self._count = total
        self._segment_rows = max(1, segment_bytes // max(1, self._columns.row_bytes))
        self._sealed: list[Segment] = []
        self._head = self._total = 0
        self._counted = self._counted_now()

    def state(self) -> ComponentState:
        self._take_what_is_new()
        values = {
            "head": self._head,
            "total": self._total,
            "counted": self._counted,
            "capacity": self._capacity,
            "columns": self._columns.described(),
        }
        return ComponentState(values=values)

    def segments(self) -> Sequence[Segment]:
        """The segments of the state just taken; rows copied once are not copied again."""
        return tuple(self._sealed)

    def sealed(self) -> Sequence[Segment]:
        """What was copied so far; whole segments of new rows are copied now."""
        if self._count is not None and self._count() - self._counted >= self._segment_rows:
            self._take_what_is_new()
        return tuple(self._sealed)

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the numbers over; the rows follow with :meth:`load_segments`.

        Raises:
            ValueError: Other columns, another capacity or schema version; nothing was changed.
        """
        if schema_version != self.schema_version:
            raise ValueError(f"schema version {schema_version}, expected {self.schema_version}")
        stored, live = state.values, self._columns.described()
        if stored["columns"] != live:
            raise ValueError(f"columns are {stored['columns']}, expected {live}")
        if stored["capacity"] != self._capacity:
            raise ValueError(f"capacity is {stored['capacity']}, expected {self._capacity}")
        self._head, self._total = int(stored["head"]), int(stored["total"])
        self._counted = int(stored["counted"])

    def load_segments(self, segments: Sequence[Segment] | None) -> None:
        """Copy the rows into the live arrays and set ``pos`` and ``full``; None: no rows.

        Raises:
            ValueError: They are not the rows from ``head`` to ``total``.
        """
        if segments is None:
            self._head = self._total = -(-self._total // self._capacity) * self._capacity
        self._sealed = list(segments or ())
        end = self._head
        for segment in self._sealed:
            start, end = end, segment.first + segment.rows
            if not segment.first <= start < end or dict(segment.columns) != self._columns.types():
                raise ValueError(f"segments do not hold rows {self._head} to {self._total}")
            for slots, rows in self._places(start, end):
                inside = (rows.start - segment.first, rows.stop - segment.first)
                for name, array in self._arrays.items():
                    array[slots] = segment.view(name, *inside)
        if end != self._total:
            raise ValueError(f"segments do not hold rows {self._head} to {self._total}")
        pos, full = self._names
        setattr(self._owner, pos, self._total % self._capacity)
        setattr(self._owner, full, self._total - self._head == self._capacity)

    def _take_what_is_new(self) -> None:
        """Number the rows that were added since the last time and copy them."""
        pos, full = self._names
        slot, is_full = int(getattr(self._owner, pos)), bool(getattr(self._owner, full))
        there = self._capacity if is_full else slot
        added = self._added(slot, there)
        if added is None:
            # A whole turn or more, or another ring: every row that is there counts as new.
            self._sealed = []
            turns = -(-(self._total + there - slot) // self._capacity)
            self._total = turns * self._capacity + slot - there
            added = there
        start, self._total = self._total, self._total + added
        self._head = self._total - there
        self._sealed = [one for one in self._sealed if one.first + one.rows > self._head]
        for first in range(start, self._total, self._segment_rows):
            self._sealed.append(self._copy(first, min(self._total, first + self._segment_rows)))

    def _added(self, slot: int, there: int) -> int | None:
        """Rows added since the last time; None if it was a whole turn or cannot be told."""
        counted, self._counted = self._counted, self._counted_now()
        added = (slot - self._total) % self._capacity
        known = self._count is not None and self._counted - counted == added
        grown = min(self._capacity, self._total - self._head + added) == there
        return added if known and grown and not self._has_lost() else None

    def _counted_now(self) -> int:
        return self._count() if self._count is not None else 0

    def _has_lost(self) -> bool:
        return any(isinstance(one, CopiedSegment) and one.lost for one in self._sealed)

    def _copy(self, first: int, stop: int) -> CopiedSegment:
        memory = SegmentMemory(stop - first, self._columns.types())
        for slots, rows in self._places(first, stop):
            for name, array in self._arrays.items():
                memory.arrays[name][rows.start - first : rows.stop - first] = array[slots]
        return CopiedSegment(first, stop - first, self._columns.types(), memory)

    def _places(self, start: int, stop: int) -> Iterator[tuple[slice, range]]:
        """Slots and row numbers of a stretch of rows; two where it goes round the end."""
        while start < stop:
            slot = start % self._capacity
            count = min(stop - start, self._capacity - slot)
            yield slice(slot, slot + count), range(start, start + count)
            start += count


@dataclass(eq=False, slots=True, weakref_slot=True)
class CopiedSegment:
    """A copy of rows that leaves the memory when it is durable."""

    first: int
    rows: int
    columns: ColumnTypes
    memory: SegmentMemory | None
    stored: StoredSegment | None = None
    lost: bool = False
    """It was asked for again after it had left the memory: its file is gone."""

    def view(self, column: str, start: int, stop: int) -> Array:
        return self._held()[column][start:stop]

    def take(self, column: str, rows: Array) -> Array:
        return self._held()[column][rows]

    def _held(self) -> Mapping[str, Array]:
        if self.memory is None:
            self.lost = True
            raise StorageError(
                "is gone from the disk",
                where=self.stored.path if self.stored is not None else "",
                rule="what a checkpoint names is deleted by the engine alone",
                way_out="save again: all rows will be written anew",
            )
        return self.memory.arrays
