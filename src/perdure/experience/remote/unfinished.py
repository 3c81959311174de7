"""Sessions that are not done, as the fields and arrays of frames, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from perdure.core.experience_records import SessionRestarted, ToolResult
from perdure.core.ids import GroupId, SessionId
from perdure.core.record_codec import record_fields, record_from_fields
from perdure.core.record_types import RecordType
from perdure.core.trajectories import PartialDelta, SessionPrefix
from perdure.experience.continuation import require_loggable_result
from perdure.experience.partials import (
    PartialTokens,
    partial_columns,
    require_loggable_deltas,
)
from perdure.experience.payloads import require_numbers
from perdure.experience.remote.frames import MALFORMED, Frame, FrameType, make_frame

R = TypeVar("R", ToolResult, SessionRestarted)


def partials_frame(deltas: Sequence[PartialDelta]) -> bytearray:
    """A frame without its number. The arrays are copied.

    Raises:
        TypeError, ValueError: A piece is not what a record can hold, a session occurs twice, or
            the pieces take too much for one frame.
    """
    require_loggable_deltas(deltas)
    return _pieces_frame(FrameType.PARTIALS, deltas)


def read_partials(frame: Frame) -> list[PartialDelta]:
    """The pieces in a frame; their arrays are views of it.

    Raises:
        ValueError: The fields do not fit one another.
    """
    try:
        return _pieces(frame)
    except MALFORMED as error:
        raise _malformed(frame, error) from error


def result_frame(record: ToolResult) -> bytearray:
    """A frame without its number.

    Raises:
        TypeError, ValueError: A field is not what a record can hold, or the result is too long.
    """
    require_loggable_result(record)
    return make_frame(FrameType.TOOL_RESULT, record_fields(record))


def read_result(frame: Frame) -> ToolResult:
    """The record in a frame. Raises ``ValueError`` if it is none."""
    return _read_record(frame, RecordType.TOOL_RESULT, ToolResult)


def restart_frame(record: SessionRestarted) -> bytearray:
    """A frame without its number.

    Raises:
        TypeError, ValueError: A field is not what a record can hold.
    """
    _require_restart(record)
    return make_frame(FrameType.SESSION_RESTARTED, record_fields(record))


def read_restart(frame: Frame) -> SessionRestarted:
    """The record in a frame.

    Raises:
        TypeError, ValueError: It is none.
    """
    record = _read_record(frame, RecordType.SESSION_RESTARTED, SessionRestarted)
    _require_restart(record)
    return record


def question_frame(about: FrameType, sessions: Sequence[SessionId]) -> bytearray:
    """A frame without its number that asks for what these sessions have in the log.

    Raises:
        TypeError, ValueError: One of them is no session.
    """
    for session in sessions:
        require_numbers(session, ())
    return make_frame(about, {"sessions": [[one.group, one.index] for one in sessions]})


def read_question(frame: Frame) -> list[SessionId]:
    """The sessions that a frame asks for.

    Raises:
        TypeError, ValueError: They are none.
    """
    try:
        sessions = [SessionId(GroupId(group), index) for group, index in frame.fields["sessions"]]
    except MALFORMED as error:
        raise _malformed(frame, error) from error
    for session in sessions:
        require_numbers(session, ())
    return sessions


def prefixes_answer(prefixes: Mapping[SessionId, SessionPrefix]) -> bytearray:
    """A frame without its number.

    Raises:
        ValueError: They take too much for one frame.
    """
    pieces = [prefix.between(0, len(prefix.response_ids_T)) for prefix in prefixes.values()]
    return _pieces_frame(FrameType.TOLD, pieces)


def read_prefixes(frame: Frame) -> dict[SessionId, SessionPrefix]:
    """The prefixes in an answer, as copies.

    Raises:
        ValueError: It has none.
    """
    return {
        piece.session: SessionPrefix(
            piece.session,
            piece.attempt,
            np.array(piece.token_ids_N),
            np.array(piece.logprobs_N),
            np.array(piece.loss_mask_N),
            piece.segments,
        )
        for piece in read_partials(frame)
    }


def results_answer(results: Mapping[SessionId, Mapping[tuple[int, int], ToolResult]]) -> bytearray:
    """A frame without its number.

    Raises:
        ValueError: They take too much for one frame.
    """
    records = [record for some in results.values() for record in some.values()]
    return make_frame(FrameType.TOLD, {"results": [record_fields(record) for record in records]})


def read_results(frame: Frame) -> dict[tuple[int, int], ToolResult]:
    """The results of one session in an answer.

    Raises:
        ValueError: It has none.
    """
    try:
        records = [_record(f, RecordType.TOOL_RESULT, ToolResult) for f in frame.fields["results"]]
    except MALFORMED as error:
        raise _malformed(frame, error) from error
    return {(record.turn, record.call): record for record in records}


def _pieces_frame(frame_type: FrameType, pieces: Sequence[PartialDelta]) -> bytearray:
    fields, arrays = partial_columns(pieces)
    return make_frame(frame_type, fields, arrays if pieces else None)


def _pieces(frame: Frame) -> list[PartialDelta]:
    fields = frame.fields
    columns = [fields[name] for name in ("sessions", "attempts", "starts", "ends", "segments")]
    rows = len(columns[0])
    if any(len(column) != rows for column in columns):
        raise ValueError("its columns have different lengths")
    if not rows:
        return []
    tokens = PartialTokens.of(fields, frame.arrays)
    pieces = [tokens.piece(row) for row in range(rows)]
    for piece, end in zip(pieces, fields["ends"], strict=True):
        if (problem := piece.problem()) is not None:
            raise ValueError(problem)
        if piece.end != end:
            raise ValueError(f"tokens up to {piece.end} where {end} is the end")
    if any(array.shape != (tokens.bounds[-1],) for array in frame.arrays.values()):
        raise ValueError(f"an array has not {tokens.bounds[-1]} tokens")
    return pieces


def _read_record(frame: Frame, record_type: RecordType, expected: type[R]) -> R:
    try:
        return _record(frame.fields, record_type, expected)
    except MALFORMED as error:
        raise _malformed(frame, error) from error


def _record(fields: dict[str, Any], record_type: RecordType, expected: type[R]) -> R:
    record = record_from_fields(record_type, fields)
    if not isinstance(record, expected):
        raise TypeError(f"{record.key()} is no {expected.__name__}")
    return record


def _require_restart(record: SessionRestarted) -> None:
    require_numbers(record.session, (record.attempt,))
    if type(record.reason) is not str:
        raise TypeError(f"{record.reason!r} in {record.key()} is not text")
    record.reason.encode()  # lone surrogates cannot be stored


def _malformed(frame: Frame, error: Exception) -> ValueError:
    return ValueError(f"frame {frame.number} is malformed: {error}")
