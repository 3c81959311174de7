"""What is appended to the log: control records, payload records, or a pair of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from perdure.core.ids import LogPosition, PayloadRef
from perdure.core.record_codec import record_fields
from perdure.core.record_types import RecordType
from perdure.core.records import ControlRecord, Partial, SessionDone
from perdure.core.trajectories import Array
from perdure.experience.format import prepare_record, prepare_referring_record


class Payload(NamedTuple):
    """A payload record to be; ``key`` is its idempotency key.

    The arrays are copied when the payload is appended.
    """

    type: RecordType
    key: str
    fields: Mapping[str, object]
    arrays: Mapping[str, Array]


@dataclass(slots=True)
class Entry:
    """A control record, a payload record, or both.

    When both are given, the control record's ``payload`` is a placeholder: the writer puts the true
    reference into the log, and into ``ref`` here.

    Attributes:
        ref: Where the payload lies; set before the future of the append resolves.
        position: End of the control record in the control log; set like ``ref``.
    """

    control: ControlRecord | None
    payload: Payload | None = None
    ref: PayloadRef | None = None
    position: LogPosition | None = None


class PreparedEntry(NamedTuple):
    """An entry as bytes, all but its place; ``size`` in bytes."""

    entry: Entry
    key: str
    control: bytearray | None
    payload: bytearray | None
    size: int


def prepare_entry(entry: Entry) -> PreparedEntry:
    """Encode an entry.

    Raises:
        TypeError: A field is not msgpack-able.
        ValueError: Neither control nor payload, a pair whose control record refers to nothing, or
            a record of 4 GiB or more.
    """
    control, payload = entry.control, entry.payload
    payload_bytes = None
    size = 0
    if payload is not None:
        payload_bytes = prepare_record(
            payload.type, key=payload.key, fields=payload.fields, arrays=payload.arrays
        )
        size = len(payload_bytes)
    if control is None:
        if payload is None:
            raise ValueError("an entry has a control record, a payload, or both")
        return PreparedEntry(entry, payload.key, None, payload_bytes, size)
    key = control.key()
    fields = record_fields(control)
    if payload is None:
        control_bytes = prepare_record(control.type, key=key, fields=fields)
    elif isinstance(control, SessionDone | Partial):
        control_bytes = prepare_referring_record(control.type, key=key, fields=fields)
    else:
        raise ValueError(f"a record of type {control.type.name} refers to no payload")
    return PreparedEntry(entry, key, control_bytes, payload_bytes, size + len(control_bytes))
