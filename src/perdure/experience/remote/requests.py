"""Finished sessions as the fields and arrays of a frame, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from perdure.core.experience_records import GroupSettled, SessionsDone
from perdure.core.ids import GroupId, PolicyVersion, SessionId
from perdure.core.record_codec import record_fields, record_from_fields
from perdure.core.record_types import RecordType, StopReason
from perdure.core.trajectories import Array
from perdure.experience.columns import ARRAYS, MAX_NUMBER, TrajectoryColumns
from perdure.experience.finished import (
    NOT_PLACED,
    FinishedSession,
    PackedSessions,
    generated_tokens,
    pack_sessions,
)
from perdure.experience.packed import PackedTrajectories
from perdure.experience.remote.frames import MALFORMED, Frame, FrameType, make_frame

_TRAJECTORY_COLUMNS = ("sessions", "prompt_tokens", "response_tokens", "segments", "stop_reasons")
_STOP_REASONS = {reason.value: reason for reason in StopReason}


class AppendRequest(NamedTuple):
    """What a store is asked to append; the sessions may be missing."""

    sessions: PackedSessions[PackedTrajectories] | None
    settled: list[GroupSettled]


def sessions_frame(
    sessions: Sequence[FinishedSession], settled: Sequence[GroupSettled]
) -> bytearray:
    """A frame without its number. The arrays are copied.

    Raises:
        TrainingError: A reward is not finite, or a response is empty.
        TypeError: An array is not of the type that the format gives it, or a value not a number.
        ValueError: The sessions take too much for one frame.
    """
    fields: dict[str, object] = {"sessions": []}
    arrays: Mapping[str, Sequence[Array]] | None = None
    if sessions:
        record, trajectories = pack_sessions(sessions)
        columns, arrays = trajectories.columns
        fields = {**columns, "rewards": record.rewards, "parts": record.parts}
    fields["settled"] = [record_fields(record) for record in settled]
    return make_frame(FrameType.SESSIONS, fields, arrays)


def read_request(frame: Frame) -> AppendRequest:
    """The request in a frame. Its arrays are views of the frame.

    Raises:
        ValueError: The fields do not fit one another.
    """
    try:
        sessions = _sessions(frame) if frame.fields["sessions"] else None
        return AppendRequest(sessions, _settled(frame.fields["settled"]))
    except MALFORMED as error:
        raise ValueError(f"request {frame.number} is malformed: {error}") from error


def _sessions(frame: Frame) -> PackedSessions[PackedTrajectories]:
    """The rows of a frame, checked.

    What is let in here is encoded again by the committing thread, whose failure is final.
    """
    fields = frame.fields
    _require_columns(fields)
    arrays = {name: frame.arrays[name] for name in ARRAYS}
    _require_lengths(fields, arrays)
    versions = [
        _version_range(segments, length)
        for segments, length in zip(fields["segments"], fields["response_tokens"], strict=True)
    ]
    ids = [SessionId(GroupId(group), index) for group, index in fields["sessions"]]
    record = SessionsDone(
        sessions=tuple(ids),
        rewards=tuple(fields["rewards"]),
        stop_reasons=tuple([_STOP_REASONS[value] for value in fields["stop_reasons"]]),
        tokens=tuple(generated_tokens([arrays["loss_mask"]], fields["response_tokens"])),
        first_versions=tuple([first for first, _ in versions]),
        last_versions=tuple([last for _, last in versions]),
        parts=tuple(fields["parts"]),
        payload=NOT_PLACED,
    )
    pieces = {name: (array,) for name, array in arrays.items()}
    columns = TrajectoryColumns({name: fields[name] for name in _TRAJECTORY_COLUMNS}, pieces)
    return PackedSessions(record, PackedTrajectories(columns, ids))


def _require_columns(fields: Mapping[str, Any]) -> None:
    """See that the columns have equally many rows of the right types."""
    rows = len(fields["sessions"])
    for name in (*_TRAJECTORY_COLUMNS, "rewards", "parts"):
        if len(fields[name]) != rows:
            raise ValueError(f"{len(fields[name])} {name} beside {rows} sessions")
    _require_types([number for key in fields["sessions"] for number in key], int)
    _require_types([*fields["prompt_tokens"], *fields["response_tokens"]], int)
    _require_types([n for some in fields["segments"] for one in some for n in one], int)
    _require_types(fields["rewards"], float)
    if not all(map(math.isfinite, fields["rewards"])):
        raise ValueError("a reward is not finite")
    parts = cast("list[dict[str, float]]", fields["parts"])
    _require_types(parts, dict)
    _require_types([name for some in parts for name in some], str)
    _require_types([value for some in parts for value in some.values()], float, int, bool)


def _require_types(values: Iterable[object], *types: type) -> None:
    wrong = set(map(type, values)).difference(types)
    if wrong:
        raise TypeError(f"{wrong.pop().__name__} instead of {types[0].__name__}")


def _require_lengths(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """See that the arrays are of their types, and as long as the lengths of the rows say."""
    for name, (dtype, lengths) in ARRAYS.items():
        total = sum(fields[lengths])
        if arrays[name].dtype != dtype or arrays[name].shape != (total,):
            found = arrays[name]
            raise ValueError(f"{name} is {found.dtype} {found.shape}, not {dtype} ({total},)")
    if min(*fields["prompt_tokens"], *fields["response_tokens"]) < 0:
        raise ValueError("a length is negative")


def _version_range(
    segments: Sequence[Sequence[int]], length: int
) -> tuple[PolicyVersion, PolicyVersion]:
    """Lowest and highest version; ``ValueError`` unless the segments cover so many tokens."""
    end = 0
    for version, start, stop in segments:
        if start != end:
            raise ValueError(f"a segment begins at {start}, behind {end}")
        end = stop
        if not 0 <= version <= MAX_NUMBER:
            raise ValueError(f"version {version} is not between 0 and {MAX_NUMBER}")
    if not segments or end != length:
        raise ValueError(f"segments end at {end} of {length} tokens")
    versions = [PolicyVersion(version) for version, _, _ in segments]
    return min(versions), max(versions)


def _settled(listed: Sequence[dict[str, Any]]) -> list[GroupSettled]:
    settled: list[GroupSettled] = []
    for fields in listed:
        record = record_from_fields(RecordType.GROUP_SETTLED, fields)
        if not isinstance(record, GroupSettled):
            raise TypeError(f"{record.key()} settles no group")
        _require_types([record.group], int)
        _require_types([record.reason], str)
        settled.append(record)
    return settled
