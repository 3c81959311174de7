"""What is appended to the log: control records, payload records, or a pair of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from perdure.core.ids import LogPosition, PayloadRef
from perdure.core.record_codec import record_fields
from perdure.core.record_types import RecordType, StopReason
from perdure.core.records import ControlRecord, Partial, SessionDone
from perdure.experience.format import (
    ControlPlace,
    PayloadPlace,
    prepare_record,
    prepare_referring_record,
)
from perdure.experience.template import RecordTemplate, Shape, Slot


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
        payload_place: What ``ref`` is made of; set before the future of the append resolves.
        control_place: What ``position`` is made of; set like ``payload_place``.
    """

    control: ControlRecord | None
    payload: Payload | None = None
    payload_place: PayloadPlace | None = None
    control_place: ControlPlace | None = None

    @property
    def ref(self) -> PayloadRef | None:
        """Where the payload lies."""
        return None if self.payload_place is None else PayloadRef(*self.payload_place)

    @property
    def position(self) -> LogPosition | None:
        """End of the control record in the control log."""
        return None if self.control_place is None else LogPosition(*self.control_place)


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
    if isinstance(control, SessionDone):
        record = _session_done(control, key)
    elif isinstance(control, Partial):
        record = prepare_referring_record(control.type, key=key, fields=record_fields(control))
    else:
        raise ValueError(f"a record of type {control.type.name} refers to no payload")
    return PreparedEntry(entry, key, record, payload.record, len(record) + len(payload.record))


def _session_done(record: SessionDone, key: str) -> bytearray:
    session, parts = record.session, record.parts
    numbers = (
        session.group,
        session.index,
        record.reward,
        record.tokens,
        record.first_version,
        record.last_version,
        *parts.values(),
        *_NOT_PLACED,
    )
    return _session_done_template(record.stop_reason, *parts).fill(key, numbers)


_NOT_PLACED = (0, 0, 0, 0, 0)


@functools.lru_cache(maxsize=256)
def _session_done_template(stop_reason: StopReason, *parts: str) -> RecordTemplate:
    number = Slot.UINT64
    named: dict[str, Shape] = dict.fromkeys(parts, Slot.FLOAT64)
    return RecordTemplate(
        RecordType.SESSION_DONE,
        {
            "session": [number, number],
            "reward": Slot.FLOAT64,
            "stop_reason": stop_reason.value,
            "tokens": number,
            "first_version": number,
            "last_version": number,
            "parts": named,
            "payload": [Slot.UINT32, Slot.UINT32, number, number, number],
        },
    )
