"""Trajectories as columns: gone over a session at a time, kept a column at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from perdure.core.record_types import StopReason
from perdure.core.trajectories import Array, Trajectory

MAX_NUMBER = 2**62
"""Highest id, version or count in a record; what counts on from it still fits."""
IDS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")
MASK = np.dtype("|u1")
_PROMPT_BYTES = IDS.itemsize
_RESPONSE_BYTES = IDS.itemsize + LOGPROBS.itemsize + MASK.itemsize
"""Of all arrays, for each token."""
_FEW = 2**27
"""So many tokens certainly fit into a record."""
_FIELDS = ("sessions", "prompt_tokens", "response_tokens", "segments", "stop_reasons")
ARRAYS = {
    "prompt_ids": (IDS, "prompt_tokens"),
    "response_ids": (IDS, "response_tokens"),
    "logprobs": (LOGPROBS, "response_tokens"),
    "loss_mask": (MASK, "response_tokens"),
}
"""Name → type, and the field with the lengths of its rows."""
_TYPES = tuple([dtype for dtype, _ in ARRAYS.values()])
_Span = tuple[int, int, int]
"""Version, start and end of a segment."""
_TEXT_OF = {reason: reason.value for reason in StopReason}


class TrajectoryColumns(NamedTuple):
    """A record with a row for each trajectory: its fields by row, its arrays in pieces.

    The arrays are of the types of the format, in its byte order.
    """

    fields: Mapping[str, Sequence[Any]]
    arrays: Mapping[str, Sequence[Array]]


class LooseTrajectories:
    """Trajectories and their columns, whose arrays are theirs.

    Attributes:
        columns: ``require_encodable`` has passed every row.
        rows: The trajectories.
        nbytes: Bytes of all arrays.
    """

    __slots__ = ("columns", "nbytes", "rows")

    def __init__(self, rows: Sequence[Trajectory], columns: TrajectoryColumns) -> None:
        self.rows = rows
        self.columns = columns
        fields = columns.fields
        prompt, response = sum(fields["prompt_tokens"]), sum(fields["response_tokens"])
        self.nbytes = _PROMPT_BYTES * prompt + _RESPONSE_BYTES * response

    def __len__(self) -> int:
        return len(self.rows)

    def unpacked(self) -> Sequence[Trajectory]:
        """All of them."""
        return self.rows

    def part(self, rows: slice) -> LooseTrajectories:
        """Some of the rows."""
        fields, arrays = self.columns
        columns = TrajectoryColumns(_cut(fields, rows), _cut(arrays, rows))
        return LooseTrajectories(self.rows[rows], columns)


def row_ends(fields: Mapping[str, Sequence[int]]) -> list[int]:
    """Bytes of the arrays of each row and all before it."""
    prompts, responses = accumulate(fields["prompt_tokens"]), accumulate(fields["response_tokens"])
    return [
        _PROMPT_BYTES * prompt + _RESPONSE_BYTES * response
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def joined_columns(columns: Sequence[TrajectoryColumns]) -> TrajectoryColumns:
    """The rows of all of them."""
    if len(columns) == 1:
        return columns[0]
    every_field, every_array = zip(*columns, strict=True)
    return TrajectoryColumns(_joined(every_field), _joined(every_array))


def checked_columns(trajectories: Sequence[Trajectory]) -> tuple[TrajectoryColumns, bool]:
    """The columns of trajectories, and whether all rows are certain to be well.

    A row is well if ``Trajectory.check`` and ``require_encodable`` would pass it, its response is
    not empty and its arrays are in the byte order of the format. What is not a trajectory at all
    may raise ``AttributeError``, ``LookupError``, ``TypeError`` or ``ValueError``.
    """
    # One loop of plain bytecode costs less than functions mapped over as few rows as a group has,
    # or called for each row.
    rows: list[tuple[Any, ...]] = []
    well = True
    for one in trajectories:
        key, prompt, response = one.session, one.prompt_ids_P, one.response_ids_T
        logprobs, mask, segments = one.logprobs_T, one.loss_mask_T, one.segments
        group, index, size, length = key.group, key.index, len(prompt), len(response)
        if len(segments) == 1:
            (only,) = segments
            version, start, end = span = (only.version, only.start, only.end)
            plain = type(version) is type(start) is type(end) is int
            covered = plain and 0 <= version < MAX_NUMBER and start == 0 < end == length
            spans: Sequence[_Span] = (span,)
        else:
            spans = [(some.version, some.start, some.end) for some in segments]
            covered = _cover(spans, length)
        well = (
            well
            and covered
            and type(group) is type(index) is int
            and 0 <= group | index < MAX_NUMBER
            and prompt.ndim == response.ndim == logprobs.ndim == mask.ndim == 1
            and len(logprobs) == len(mask) == length
            and (prompt.dtype, response.dtype, logprobs.dtype, mask.dtype) == _TYPES
            and length < _FEW > size
        )
        reason = _TEXT_OF[one.stop_reason]
        row = ((group, index), size, length, spans, reason, prompt, response, logprobs, mask)
        rows.append(row)
    columns = _columns(rows)
    return (columns if well else _in_format(columns)), well


def _in_format(columns: TrajectoryColumns) -> TrajectoryColumns:
    """The same with arrays in the byte order of the format; those of other types stay."""
    arrays = {
        name: [
            array.astype(dtype) if np.can_cast(array.dtype, dtype, "equiv") else array
            for array in columns.arrays[name]
        ]
        for name, (dtype, _) in ARRAYS.items()
    }
    return columns._replace(arrays=arrays)


def _columns(rows: Sequence[tuple[Any, ...]]) -> TrajectoryColumns:
    columns = list(zip(*rows, strict=True))
    count = len(_FIELDS)
    return TrajectoryColumns(
        dict(zip(_FIELDS, columns[:count], strict=True)),
        dict(zip(ARRAYS, columns[count:], strict=True)),
    )


def _cover(spans: Sequence[_Span], length: int) -> bool:
    """Whether plain numbers of segments, none of them empty, cover all tokens."""
    behind = 0
    for version, start, end in spans:
        plain = type(version) is type(start) is type(end) is int
        if not plain or not 0 <= version < MAX_NUMBER or not behind == start < end:
            return False
        behind = end
    return behind == length > 0


def _cut(columns: Mapping[str, Sequence[Any]], rows: slice) -> dict[str, Sequence[Any]]:
    return {name: column[rows] for name, column in columns.items()}


def _joined(parts: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Sequence[Any]]:
    return {name: joined_lists([part[name] for part in parts]) for name in parts[0]}


def joined_lists(parts: Iterable[Sequence[Any]]) -> list[Any]:
    """One list of all elements: its own loop over parts, never over elements."""
    joined: list[Any] = []
    for part in parts:
        joined += part
    return joined
