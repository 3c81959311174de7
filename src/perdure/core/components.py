"""The component contract: what a checkpoint stores of each named part of a run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from perdure.core.boxes import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that this rank holds, for components that are spread over ranks.

    Attributes:
        shape: Shape of the whole tensor, the same on every rank.
        offsets: Where the part begins, one number an axis.
        data: The part: a numpy array or a torch tensor with as many axes.
        stored: Whether this rank stores it; of ranks that hold the same part, exactly one does.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Any
    stored: bool = True

    @property
    def box(self) -> Box:
        """The part as a box of the whole."""
        return Box(self.offsets, tuple(self.data.shape))


@dataclass(frozen=True, slots=True)
class ComponentState:
    """State of one component.

    Attributes:
        tensors: Name → numpy array, torch tensor (``DTensor`` included) or :class:`Shard`. The
            engine copies them while staging; they are never referred to afterwards. A component
            whose live tensor is spread over ranks is given its own part of the stored one.
        values: msgpack-able small values (numbers, text, bytes, lists, mappings with text keys).
        legacy: A pickle, of components that were registered as legacy ones only.
    """

    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    legacy: bytes | None = None


class Checkpointable(Protocol):
    """A part of a run that a checkpoint stores under a name."""

    @property
    def schema_version(self) -> int:
        """Raised whenever the meaning of the state changes."""
        ...

    def state(self) -> ComponentState:
        """Current state; tensors may alias live ones (the engine copies before it returns)."""
        ...

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the state over *in place*; must copy, never alias ``state``.

        Raises:
            ValueError: The state does not fit (missing or extra name, wrong shape or dtype).
        """
        ...


@runtime_checkable
class Versioned(Protocol):
    """A component that says when its state changes, so that no torn copy of it is ever saved."""

    @property
    def state_version(self) -> int:
        """Even while nothing changes, odd during a change, never the same again after one.

        It is read before and after the copy. :class:`perdure.checkpoint.ChangeCounter` counts so.
        """
        ...


@runtime_checkable
class Spread(Protocol):
    """A component whose tensors may be spread over ranks: it is loaded with its part of them."""

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """Live tensors that lie on the ranks as the stored ones of these names are to lie.

        Args:
            shapes: Name → shape of the whole stored tensor.

        Returns:
            Name → :class:`Shard` or ``DTensor`` of that shape: the stored tensor is handed over as
            one of the same kind and box. What is left out, or is neither, is handed over as a
            whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment that is durable: where it lies and how every byte of it can be checked.

    Attributes:
        path: File below the run directory. A name is used for one content only.
        first: Number of its first row.
        rows: How many rows it holds.
        bytes: Size of the file.
        checksum: xxh3-128 of the file.
        index_checksum: xxh3-128 of its index, which holds a checksum of every block.
    """

    path: str
    first: int
    rows: int
    bytes: int
    checksum: str
    index_checksum: str


class Segment(Protocol):
    """Consecutive rows, one array a column, that never change again.

    A checkpoint refers to them instead of copying them, and writes each of them once. The object
    itself is what says that the segment is still needed.
    """

    stored: StoredSegment | None
    """Where it is durable; set by the engine, read by it before the segment is written again."""

    @property
    def first(self) -> int:
        """Number of the first row, counted from the first one ever."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Name → element type and shape of one row."""
        ...

    def view(self, column: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows ``start`` to ``stop``, counted inside the segment; not to be written to.

        Raises:
            DamagedError: Stored bytes are wrong; they are checked before they are first used.
        """
        ...

    def take(self, column: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy of the rows with these numbers, counted inside the segment.

        Raises:
            DamagedError: Stored bytes are wrong; they are checked before they are first used.
        """
        ...


@runtime_checkable
class Segmented(Protocol):
    """What a :class:`Checkpointable` has besides if it grows at one end and is cut at the other."""

    def segments(self) -> Sequence[Segment]:
        """Everything that belongs to the state just taken, in order of their rows.

        The engine keeps the objects until they are durable and never copies their rows.
        """
        ...

    def sealed(self) -> Sequence[Segment]:
        """What is there of whole segments, between checkpoints; they may be stored beforehand."""
        ...

    def load_segments(self, segments: Sequence[Segment] | None) -> None:
        """Take the rows over, after ``load``; what was there before is gone.

        Stored segments are opened, not read: their bytes are checked as they are first used.

        Args:
            segments: None: start without rows, as the caller has asked for.

        Raises:
            ValueError: They do not fit the loaded state.
        """
        ...


def is_segmented(component: object) -> TypeGuard[Segmented]:
    """As ``isinstance``, which looks through the protocol anew each time and takes 80 µs."""
    return _is_segmented(type(component))


@functools.cache
def _is_segmented(kind: type) -> bool:
    return issubclass(kind, Segmented)


def is_versioned(component: object) -> TypeGuard[Versioned]:
    """As ``isinstance``, without looking through the protocol each time."""
    return hasattr(component, "state_version")
