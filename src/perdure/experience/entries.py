"""What is appended to the log: control records, payload records, or a pair of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from perdure.core.ids import LogPosition, PayloadRef
from perdure.core.record_codec import record_fields
from perdure.core.records import ControlRecord, Partial, SessionsDone
from perdure.experience.format import (
    prepare_record,
    prepare_referring_record,
)


class Payload(NamedTuple):
    """A payload record as bytes, all but its place; ``key`` is its idempotency key."""

    key: str
    record: bytearray


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
    if control is None:
        if payload is None:
            raise ValueError("an entry has a control record, a payload, or both")
        return PreparedEntry(entry, payload.key, None, payload.record, len(payload.record))
    key = control.key()
    if payload is None:
        record = prepare_record(control.type, key=key, fields=record_fields(control))
        return PreparedEntry(entry, key, record, None, len(record))
    if isinstance(control, SessionsDone | Partial):
        record = prepare_referring_record(control.type, key=key, fields=record_fields(control))
    else:
        raise ValueError(f"a record of type {control.type.name} refers to no payload")
    return PreparedEntry(entry, key, record, payload.record, len(record) + len(payload.record))
