"""Trajectories to payload records and back, without copying on the way back."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import numpy as np

from perdure.core.errors import DamagedError
from perdure.core.ids import GroupId, PayloadRef, PolicyVersion, SessionId
from perdure.core.record_types import RecordType, StopReason, Stream
from perdure.core.storage_api import Storage
from perdure.core.trajectories import Array, Segment, Trajectory
from perdure.experience.entries import Payload
from perdure.experience.format import parse_record, record_arrays, record_body
from perdure.experience.scan import map_segment
from perdure.experience.segments import SegmentName, damage
from perdure.experience.template import RecordTemplate, Slot

_MAX_MAPS = 64
_ARRAYS = ("prompt_ids", "response_ids", "logprobs", "loss_mask")
_DTYPES = (np.dtype("<i4"), np.dtype("<i4"), np.dtype("<f4"), np.dtype("|u1"))


def trajectory_payload(trajectory: Trajectory) -> Payload:
    """The payload record of a session's trajectory. The arrays are copied.

    Raises:
        TypeError: An array is not of the type that the format gives it.
    """
    arrays = (
        trajectory.prompt_ids_P,
        trajectory.response_ids_T,
        trajectory.logprobs_T,
        trajectory.loss_mask_T,
    )
    if tuple([array.dtype for array in arrays]) != _DTYPES:
        turned = zip(arrays, _DTYPES, strict=True)
        arrays = [array.astype(dtype, casting="equiv") for array, dtype in turned]
    session, segments = trajectory.session, trajectory.segments
    numbers: list[int] = [session.group, session.index]
    for segment in segments:
        numbers += (segment.version, segment.start, segment.end)
    lengths = [len(array) for array in arrays]
    template = _trajectory_template(trajectory.stop_reason, len(segments), *lengths)
    key = f"trajectory/{session.key()}"
    return Payload(key, template.fill(key, numbers, [array.tobytes() for array in arrays]))


@functools.lru_cache(maxsize=1024)
def _trajectory_template(stop_reason: StopReason, segments: int, *lengths: int) -> RecordTemplate:
    number = Slot.UINT64
    shapes = [(length,) for length in lengths]
    return RecordTemplate(
        RecordType.TRAJECTORY,
        {
            "session": [number, number],
            "segments": [[number, number, number] for _ in range(segments)],
            "stop_reason": stop_reason.value,
        },
        arrays=tuple(zip(_ARRAYS, _DTYPES, shapes, strict=True)),
    )


class PayloadReader:
    """Reads payload records by reference. Arrays are read-only views of the memory-mapped file.

    Not thread-safe. At most 64 segments stay mapped by the reader itself; views keep theirs alive.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._maps: OrderedDict[SegmentName, memoryview] = OrderedDict()

    def read(self, ref: PayloadRef) -> tuple[RecordType, dict[str, Any], dict[str, Array]]:
        """Type, fields and arrays of a payload record, its checksum verified.

        Raises:
            DamagedError: The reference does not lead to a valid record with its checksum.
        """
        name = SegmentName(ref.incarnation, Stream.PAYLOAD, ref.segment)
        view = self._map(name, ref.offset + ref.length)
        header = parse_record(view, ref.offset, where=name.path)
        if header is None or (header.length, header.checksum) != (ref.length, ref.checksum):
            raise damage(
                name, ref.offset, "not the record referred to", rule="payload never changes"
            )
        fields = record_body(view, ref.offset, header)
        return RecordType(header.type), fields, record_arrays(view, ref.offset, fields)

    def trajectory(self, ref: PayloadRef) -> Trajectory:
        """The trajectory of a finished session.

        Raises:
            DamagedError: The reference does not lead to a valid trajectory.
        """
        record_type, fields, arrays = self.read(ref)
        if record_type is not RecordType.TRAJECTORY:
            raise DamagedError(
                f"a record of type {record_type.name} is no trajectory",
                where=SegmentName(ref.incarnation, Stream.PAYLOAD, ref.segment).path,
                rule="session_done refers to a trajectory",
            )
        group, index = fields["session"]
        segments = (
            Segment(PolicyVersion(version), start, end)
            for version, start, end in fields["segments"]
        )
        return Trajectory(
            session=SessionId(GroupId(group), index),
            prompt_ids_P=arrays["prompt_ids"],
            response_ids_T=arrays["response_ids"],
            logprobs_T=arrays["logprobs"],
            loss_mask_T=arrays["loss_mask"],
            segments=tuple(segments),
            stop_reason=StopReason(fields["stop_reason"]),
        )

    def _map(self, name: SegmentName, length: int) -> memoryview:
        view = self._maps.pop(name, None)
        if view is None or len(view) < length:
            # A segment of the running incarnation grows: map it again.
            view = map_segment(self._storage, name)
        self._maps[name] = view
        if len(self._maps) > _MAX_MAPS:
            self._maps.popitem(last=False)
        return view
