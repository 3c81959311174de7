"""Frames: what either end of a connection sends, each a record of the log's format."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from perdure.core.trajectories import Array
from perdure.experience.format import (
    ALIGNMENT,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    Stamp,
    checksum_holds,
    decode_header,
    prepare_record,
    record_arrays,
    record_body,
    stamp_record,
)

MAX_FRAME_BYTES = 2**28
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a value raises that is not of the form it should have. No assertion: what comes from
another process is checked under ``python -O`` as well.
"""


class FrameType(enum.IntEnum):
    """Number in the header; none is a number of a log record. Numbers are never reused."""

    HELLO = 201
    SESSIONS = 202
    URGE = 203
    ACKNOWLEDGED = 204
    REFUSED = 205
    FAREWELL = 206
    PARTIALS = 207
    TOOL_RESULT = 208
    SESSION_RESTARTED = 209
    ASK_PREFIXES = 210
    ASK_TOOL_RESULTS = 211
    TOLD = 212


APPENDS = frozenset(
    {FrameType.SESSIONS, FrameType.PARTIALS, FrameType.TOOL_RESULT, FrameType.SESSION_RESTARTED}
)
QUESTIONS = frozenset({FrameType.ASK_PREFIXES, FrameType.ASK_TOOL_RESULTS})
"""Requests that are answered with ``TOLD``, not with ``ACKNOWLEDGED``."""


class BadFrameError(Exception):
    """The bytes are not a frame of the protocol: the connection is of no further use."""


class Frame(NamedTuple):
    """A frame that was received whole; ``number`` is that of the request it belongs to."""

    type: FrameType
    number: int
    fields: dict[str, Any]
    arrays: dict[str, Array]


def make_frame(
    frame_type: FrameType,
    fields: Mapping[str, object],
    arrays: Mapping[str, Sequence[Array]] | None = None,
) -> bytearray:
    """A frame as bytes, all but its number and checksum.

    Raises:
        TypeError: A field is not msgpack-able.
        ValueError: It would take more than ``MAX_FRAME_BYTES``.
    """
    frame = prepare_record(frame_type, key="", fields=fields, arrays=arrays)
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(
            f"the frame takes {len(frame)} bytes; at most {MAX_FRAME_BYTES} are sent at once"
        )
    return frame


def number_frame(frame: bytearray, number: int) -> bytearray:
    """Give a frame its number and checksum."""
    stamp_record(frame, Stamp(0, True, number, 0, 0))
    return frame


def frame_length(header: memoryview) -> int:
    """Length in bytes of the frame that begins with this header.

    Raises:
        BadFrameError: No frame begins so.
    """
    length = int.from_bytes(header[8:12], "little") * ALIGNMENT
    if bytes(header[:4]) != MAGIC or not HEADER_BYTES <= length <= MAX_FRAME_BYTES:
        raise BadFrameError(f"no frame begins with {header[:12].hex()}")
    return length


def parse_frame(view: memoryview) -> Frame:
    """A whole frame; its arrays are views, read-only if the memory is.

    Raises:
        BadFrameError: The bytes are not what was sent, or not of this protocol.
    """
    header = decode_header(view, 0)
    if header is None or not checksum_holds(view, 0, header):
        raise BadFrameError(f"the checksum of a frame of {len(view)} bytes does not hold")
    version = int.from_bytes(view[4:6], "little")
    try:
        if version != FORMAT_VERSION:
            raise ValueError(f"format {version}")
        # The garbage collector lets tuples of numbers be.
        fields = record_body(view, 0, header, tuples=True)
        arrays = record_arrays(view, 0, fields) if "arrays" in fields else {}
        return Frame(FrameType(header.type), header.lsn, fields, arrays)
    except MALFORMED as error:
        raise BadFrameError(f"a frame of type {header.type} cannot be read: {error}") from error
