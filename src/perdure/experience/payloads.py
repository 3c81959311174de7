"""Trajectories to payload records and back, without copying on the way back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perdure.core.errors import DamagedError
from perdure.core.ids import GroupId, PayloadRef, PolicyVersion, SessionId
from perdure.core.record_types import RecordType, StopReason, Stream
from perdure.core.storage_api import Storage
from perdure.core.trajectories import Array, Segment, Trajectory
from perdure.experience.columns import ARRAYS, IDS, LOGPROBS, MASK, MAX_NUMBER, TrajectoryColumns
from perdure.experience.format import (
    Record,
    laid_out,
    pack_plain,
    parse_record,
    record_arrays,
    record_body,
    record_pieces,
)
from perdure.experience.record_memory import RecordMemory
from perdure.experience.scan import map_segment
from perdure.experience.segments import SegmentName, damage

_MAX_BYTES = 2**32 - 2**20
_MAX_MAPS = 64
_MAX_PARSED = 16


class Payload(NamedTuple):
    """A payload record as bytes, all but its place; ``key`` is its idempotency key."""

    key: str
    record: Record


def require_encodable(trajectory: Trajectory) -> None:
    """See that a record can hold a trajectory.

    Raises:
        TypeError: An array is not of the type that the format gives it or has several axes, or an
            id, version or bound is not a plain number.
        ValueError: A record would take 4 GiB or more, or a number is negative or above
            ``MAX_NUMBER``.
    """
    _require_arrays(trajectory)
    _require_numbers(trajectory)


def _require_arrays(trajectory: Trajectory) -> None:
    if trajectory.nbytes > _MAX_BYTES:
        raise ValueError(
            f"{trajectory.session.key()} takes {trajectory.nbytes} bytes; a record takes less than"
            " 4 GiB"
        )
    arrays = (
        (trajectory.prompt_ids_P, IDS),
        (trajectory.response_ids_T, IDS),
        (trajectory.logprobs_T, LOGPROBS),
        (trajectory.loss_mask_T, MASK),
    )
    require_arrays(trajectory.session, arrays)


def require_arrays(session: SessionId, arrays: Iterable[tuple[Array, np.dtype[Any]]]) -> None:
    """Raises ``TypeError`` for an array that is not of its type or has several axes."""
    for array, dtype in arrays:
        if array.dtype is not dtype and not np.can_cast(array.dtype, dtype, "equiv"):
            raise TypeError(f"an array of {session.key()} is {array.dtype}, not {dtype}")
        if array.ndim != 1:
            raise TypeError(f"an array of {session.key()} has {array.ndim} axes, not 1")


def require_numbers(session: SessionId, numbers: Iterable[int]) -> None:
    """Raises ``TypeError`` or ``ValueError`` for what is no number that a record can hold."""
    for number in (session.group, session.index, *numbers):
        if type(number) is not int:
            raise TypeError(f"{number!r} in {session.key()} is {type(number).__name__}, not int")
        if not 0 <= number <= MAX_NUMBER:
            raise ValueError(f"{number} in {session.key()} is not between 0 and {MAX_NUMBER}")


def _require_numbers(trajectory: Trajectory) -> None:
    session = trajectory.session
    require_numbers(session, numbers_of(trajectory.segments))
    if type(trajectory.stop_reason) is not StopReason:
        raise TypeError(f"the stop reason of {session.key()} is {trajectory.stop_reason!r}")


def numbers_of(segments: Iterable[Segment]) -> Iterator[int]:
    """Versions and bounds."""
    for segment in segments:
        yield from (segment.version, segment.start, segment.end)


def columns_payload(columns: TrajectoryColumns, memory: RecordMemory) -> Payload:
    """The payload record of these rows. The arrays are copied, into ``memory``."""
    fields, arrays = columns
    group, index = fields["sessions"][0]
    key = f"trajectories/{SessionId(group, index).key()}"
    laid = [
        laid_out(name, dtype, (sum(fields[lengths]),), pieces=arrays[name])
        for name, (dtype, lengths) in ARRAYS.items()
    ]
    pieces = record_pieces(
        RecordType.TRAJECTORIES, key=key, fields=fields, arrays=laid, pack=pack_plain
    )
    return Payload(key, memory.joined(pieces))


def trajectory_in_row(
    fields: Mapping[str, Any], arrays: Mapping[str, Array], row: int, *, starts: tuple[int, int]
) -> Trajectory:
    """The trajectory in a row of such a record; its arrays are views.

    Args:
        starts: Where its prompt and its response begin in the arrays.
    """
    prompt = slice(starts[0], starts[0] + fields["prompt_tokens"][row])
    response = slice(starts[1], starts[1] + fields["response_tokens"][row])
    group, index = fields["sessions"][row]
    return Trajectory(
        session=SessionId(GroupId(group), index),
        prompt_ids_P=arrays["prompt_ids"][prompt],
        response_ids_T=arrays["response_ids"][response],
        logprobs_T=arrays["logprobs"][response],
        loss_mask_T=arrays["loss_mask"][response],
        segments=tuple(
            [
                Segment(PolicyVersion(version), start, end)
                for version, start, end in fields["segments"][row]
            ]
        ),
        stop_reason=StopReason(fields["stop_reasons"][row]),
    )


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A verified payload record: type, fields, and read-only views of its arrays."""

    type: RecordType
    fields: dict[str, Any]
    arrays: dict[str, Array]


class PayloadReader:
    """Reads payload records by reference. Arrays are read-only views of the memory-mapped file.

    Not thread-safe. At most 64 segments stay mapped by the reader itself; views keep theirs alive.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._maps: OrderedDict[SegmentName, memoryview] = OrderedDict()
        self._parsed: OrderedDict[PayloadRef, _Parsed] = OrderedDict()

    def read(self, ref: PayloadRef) -> tuple[RecordType, dict[str, Any], dict[str, Array]]:
        """Type, fields and arrays of a payload record, its checksum verified.

        Raises:
            DamagedError: The reference does not lead to a valid record with its checksum.
        """
        parsed = self._parsed.pop(ref, None) or self._parse(ref)
        self._parsed[ref] = parsed
        if len(self._parsed) > _MAX_PARSED:
            self._parsed.popitem(last=False)
        return parsed.type, parsed.fields, parsed.arrays

    def trajectory(self, ref: PayloadRef, *, row: int, session: SessionId) -> Trajectory:
        """The trajectory in a row of a record.

        Raises:
            DamagedError: The reference does not lead to a valid record with that session there.
        """
        record_type, fields, arrays = self.read(ref)
        is_right = record_type is RecordType.TRAJECTORIES and row < len(fields["sessions"])
        if not is_right or fields["sessions"][row] != [session.group, session.index]:
            raise DamagedError(
                f"row {row} of a record of type {record_type.name} is not {session.key()}",
                where=SegmentName(ref.incarnation, Stream.PAYLOAD, ref.segment).path,
                rule="sessions_done refers to the trajectories of its sessions, in order",
                way_out="restore the log from a copy",
            )
        starts = (sum(fields["prompt_tokens"][:row]), sum(fields["response_tokens"][:row]))
        return trajectory_in_row(fields, arrays, row, starts=starts)

    def _parse(self, ref: PayloadRef) -> _Parsed:
        name = SegmentName(ref.incarnation, Stream.PAYLOAD, ref.segment)
        view = self._map(name, ref.offset + ref.length)
        header = parse_record(view, ref.offset, where=name.path)
        if header is None or (header.length, header.checksum) != (ref.length, ref.checksum):
            raise damage(
                name, ref.offset, "not the record referred to", rule="payload never changes"
            )
        fields = record_body(view, ref.offset, header)
        return _Parsed(RecordType(header.type), fields, record_arrays(view, ref.offset, fields))

    def _map(self, name: SegmentName, length: int) -> memoryview:
        view = self._maps.pop(name, None)
        if view is None or len(view) < length:
            # A segment of the running incarnation grows: map it again.
            view = map_segment(self._storage, name)
        self._maps[name] = view
        if len(self._maps) > _MAX_MAPS:
            self._maps.popitem(last=False)
        return view
