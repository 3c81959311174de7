"""Trajectories to payload records and back, without copying on the way back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from perdure.core.errors import DamagedError
from perdure.core.ids import GroupId, PayloadRef, PolicyVersion, SessionId
from perdure.core.record_types import RecordType, StopReason, Stream
from perdure.core.storage_api import Storage
from perdure.core.trajectories import Array, Segment, Trajectory
from perdure.experience.format import parse_record, record_arrays, record_body
from perdure.experience.scan import map_segment
from perdure.experience.segments import SegmentName, damage
from perdure.experience.writer import Payload

_MAX_MAPS = 64


def trajectory_payload(trajectory: Trajectory) -> Payload:
    """The payload record of a session's trajectory."""
    session = trajectory.session
    return Payload(
        RecordType.TRAJECTORY,
        f"trajectory/{session.key()}",
        {
            "session": [session.group, session.index],
            "segments": [[s.version, s.start, s.end] for s in trajectory.segments],
            "stop_reason": trajectory.stop_reason.value,
        },
        {
            "prompt_ids": trajectory.prompt_ids_P,
            "response_ids": trajectory.response_ids_T,
            "logprobs": trajectory.logprobs_T,
            "loss_mask": trajectory.loss_mask_T,
        },
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
