"""Trajectories as columns: the rows of a record, looked at a column at a time."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from perdure.core.trajectories import Array, Trajectory

MAX_NUMBER = 2**62
"""Highest id, version or count in a record; what counts on from it still fits."""
IDS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")
MASK = np.dtype("|u1")
_FEW = 2**27
"""So many tokens certainly fit into a record."""
_PLAIN = frozenset({int})
# What is done to every row costs several times as much as bytecode.
_PARTS = operator.attrgetter(
    "session",
    "prompt_ids_P",
    "response_ids_T",
    "logprobs_T",
    "loss_mask_T",
    "segments",
    "stop_reason",
)
_ROW = operator.attrgetter("group", "index")
_SPAN = operator.attrgetter("version", "start", "end")
_KIND = operator.attrgetter("dtype", "shape")
_VALUE = operator.attrgetter("_value_")
"""``value`` of an enumeration's member, without the descriptor that makes it slow."""


class TrajectoryColumns(NamedTuple):
    """A record with a row for each trajectory: its fields by row, its arrays in pieces."""

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
        self.nbytes = _nbytes(sum(fields["prompt_tokens"]), sum(fields["response_tokens"]))

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


def row_bytes(fields: Mapping[str, Sequence[Any]]) -> list[int]:
    """Bytes of the arrays of each row."""
    return list(map(_nbytes, fields["prompt_tokens"], fields["response_tokens"]))


def _nbytes(prompt: int, response: int) -> int:
    return IDS.itemsize * prompt + (IDS.itemsize + LOGPROBS.itemsize + MASK.itemsize) * response


def joined_columns(columns: Sequence[TrajectoryColumns]) -> TrajectoryColumns:
    """The rows of all of them."""
    if len(columns) == 1:
        return columns[0]
    every_field, every_array = zip(*columns, strict=True)
    return TrajectoryColumns(_joined(every_field), _joined(every_array))


def trajectory_columns(trajectories: Sequence[Trajectory]) -> TrajectoryColumns:
    """The columns of trajectories that :func:`are_plain` or ``require_encodable`` has passed."""
    ids, prompts, responses, logprobs, masks, segments, reasons = zip(
        *map(_PARTS, trajectories), strict=True
    )
    fields: dict[str, list[Any]] = {
        "sessions": list(map(_ROW, ids)),
        "prompt_tokens": [array.size for array in prompts],
        "response_tokens": [array.size for array in responses],
        "segments": [list(map(_SPAN, some)) for some in segments],
        "stop_reasons": list(map(_VALUE, reasons)),
    }
    arrays = {
        "prompt_ids": prompts,
        "response_ids": responses,
        "logprobs": logprobs,
        "loss_mask": masks,
    }
    return TrajectoryColumns(fields, arrays)


def are_plain(columns: TrajectoryColumns) -> bool:
    """Whether nothing is wrong with any row: a quick answer for the many that are well.

    A row is well if ``Trajectory.check`` and ``require_encodable`` would pass it, its response is
    not empty and its arrays are in the byte order of the format. What is not a trajectory at all
    may raise ``TypeError`` or ``ValueError``.
    """
    fields, arrays = columns
    segments, lengths = fields["segments"], fields["response_tokens"]
    groups, indexes = zip(*fields["sessions"], strict=True)
    versions, starts, ends = zip(*chain.from_iterable(segments), strict=True)
    numbers = groups + indexes + versions
    plain = _PLAIN.issuperset(map(type, numbers + starts + ends))
    if not plain or min(numbers) < 0 or max(numbers) > MAX_NUMBER:
        return False
    if set(map(len, segments)) == {1}:
        covered = list(ends) == lengths and not any(starts) and min(lengths) > 0
    else:
        covered = all(map(_covers, segments, lengths))
    return covered and _are_arrays(arrays, fields["prompt_tokens"], lengths)


def _covers(segments: Sequence[tuple[int, int, int]], length: int) -> bool:
    """Whether segments, none of them empty, cover the tokens of a row, of which it has."""
    end = 0
    for _, start, stop in segments:
        if start != end or stop <= start:
            return False
        end = stop
    return end == length > 0


def _are_arrays(
    arrays: Mapping[str, Sequence[Array]], prompts: Sequence[int], responses: Sequence[int]
) -> bool:
    """Whether arrays have their types, one axis, and these lengths."""
    expected = (
        *zip(repeat(IDS), zip(prompts)),
        *zip(repeat(IDS), zip(responses)),
        *zip(repeat(LOGPROBS), zip(responses)),
        *zip(repeat(MASK), zip(responses)),
    )
    given = chain.from_iterable(arrays.values())
    return tuple(map(_KIND, given)) == expected and max(*prompts, *responses) < _FEW


def _cut(columns: Mapping[str, Sequence[Any]], rows: slice) -> dict[str, Sequence[Any]]:
    return {name: column[rows] for name, column in columns.items()}


def _joined(parts: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Sequence[Any]]:
    return {name: list(chain.from_iterable([part[name] for part in parts])) for name in parts[0]}
