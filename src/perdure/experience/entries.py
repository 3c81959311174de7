"""What is appended to the log: control records, payload records, pairs of them, sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perdure.core.experience_records import (
    GroupSettled,
    Partials,
    SessionsDone,
)
from perdure.core.ids import LogPosition, PayloadRef
from perdure.core.record_codec import record_fields
from perdure.core.records import ControlRecord
from perdure.experience.columns import LooseTrajectories, joined_columns, joined_lists
from perdure.experience.format import Record, prepare_record, prepare_referring_record
from perdure.experience.packed import PackedTrajectories
from perdure.experience.payloads import Payload, columns_payload
from perdure.experience.record_memory import RecordMemory

MAX_SESSIONS = 1024
"""Sessions in one record, at most."""
MAX_BYTES = 2**20
"""Bytes of arrays in one record of more than one session, at most."""
_ALONE_BYTES = 2**17
"""Sessions with so many bytes of arrays are not put together with others."""


@dataclass(slots=True)
class Entry:
    """A control record, a payload record, or both; or sessions with their trajectories.

    The control record's ``payload`` is a placeholder: the writer puts the true reference into the
    log, and into ``ref`` here. Sessions of neighbouring entries share a record.

    Attributes:
        trajectories: Of a ``SessionsDone`` without payload: what its payload is to be made of, row
            by row. The writer forgets them if it has queued them encoded: an entry is appended
            once.
        ref: Where the payload lies; set before the future of the append resolves.
        first_row: Row of the payload at which those of this entry begin; set like ``ref``.
        position: End of the control record in the control log; set like ``ref``.
    """

    control: ControlRecord | None
    payload: Payload | None = None
    trajectories: LooseTrajectories | PackedTrajectories | None = None
    ref: PayloadRef | None = None
    first_row: int = 0
    position: LogPosition | None = None


class PreparedEntry(NamedTuple):
    """An entry that can be encoded; ``size`` in bytes, without the fields of sessions.

    Attributes:
        control: The control record as bytes, all but its place, if there is one.
        payload: Likewise. Neither: the sessions are encoded with those of their neighbours.
    """

    entry: Entry
    key: str
    size: int
    control: bytearray | None
    payload: Record | None

    @property
    def is_encoded(self) -> bool:
        return self.control is not None or self.payload is not None


class PackedEntries(NamedTuple):
    """Entries that lie in the same control record, payload record or both."""

    entries: Sequence[Entry]
    control: bytearray | None
    payload: Record | None


def prepare_entry(entry: Entry) -> PreparedEntry:
    """Encode an entry, or see that it can be encoded.

    Raises:
        TypeError: A field is not msgpack-able.
        ValueError: Neither control nor payload, a pair whose control record refers to nothing, or
            a record of 4 GiB or more.
    """
    control, payload = entry.control, entry.payload
    if control is None:
        if payload is None:
            raise ValueError("an entry has a control record, a payload, or both")
        return PreparedEntry(entry, payload.key, len(payload.record), None, payload.record)
    if entry.trajectories is not None:
        return _prepare_sessions(entry, control)
    key = control.key()
    if payload is None:
        record = prepare_record(control.type, key=key, fields=record_fields(control))
        return PreparedEntry(entry, key, len(record), record, None)
    record = _referring(control)
    size = len(record) + len(payload.record)
    return PreparedEntry(entry, key, size, record, payload.record)


def encode_large(item: PreparedEntry, memory: RecordMemory) -> PreparedEntry:
    """The same with its sessions encoded, if they fill a record more or less by themselves.

    Trajectories are copied into ``memory``.
    """
    if item.size < _ALONE_BYTES or item.is_encoded:
        return item
    control, payload = _encode_sessions([item.entry], memory)
    return item._replace(control=control, payload=payload)


def pack_entries(items: Sequence[PreparedEntry], memory: RecordMemory) -> list[PackedEntries]:
    """Entries as records in their order, sessions of neighbours together.

    What settles groups does not part neighbours: it stays behind the sessions in front of it.
    Trajectories are copied into ``memory``.
    """
    packed: list[PackedEntries] = []
    some: list[Entry] = []
    rows = size = place = 0

    def close() -> None:
        """Insert the sessions as one pair of records."""
        nonlocal some
        if some:
            packed.insert(place, PackedEntries(some, *_encode_sessions(some, memory)))
            some = []

    for item in items:
        if item.is_encoded:
            if not isinstance(item.entry.control, GroupSettled):
                close()
            packed.append(PackedEntries((item.entry,), item.control, item.payload))
            continue
        more = len(_trajectories(item.entry))
        if some and (rows + more > MAX_SESSIONS or size + item.size > MAX_BYTES):
            close()
        if not some:
            rows, size, place = 0, 0, len(packed)
        some.append(item.entry)
        rows += more
        size += item.size
    close()
    return packed


def _prepare_sessions(entry: Entry, control: ControlRecord) -> PreparedEntry:
    trajectories = _trajectories(entry)
    assert isinstance(control, SessionsDone)
    assert len(control.sessions) == len(trajectories)
    return PreparedEntry(entry, control.key(), trajectories.nbytes, None, None)


def _trajectories(entry: Entry) -> LooseTrajectories | PackedTrajectories:
    assert entry.trajectories is not None
    return entry.trajectories


def _encode_sessions(entries: Sequence[Entry], memory: RecordMemory) -> tuple[bytearray, Record]:
    """One record of all rows, and its payload."""
    controls: list[SessionsDone] = []
    rows = 0
    for entry in entries:
        assert isinstance(entry.control, SessionsDone)
        controls.append(entry.control)
        entry.first_row = rows
        rows += len(entry.control.sessions)
    columns = joined_columns([_trajectories(entry).columns for entry in entries])
    control = prepare_referring_record(
        SessionsDone.type,
        key=controls[0].key(),
        fields=_sessions_done_fields(controls, columns.fields),
    )
    return control, columns_payload(columns, memory).record


def _sessions_done_fields(
    controls: Sequence[SessionsDone], columns: Mapping[str, object]
) -> dict[str, object]:
    """What ``record_fields`` would give of the rows of all records in one, without making it."""
    return {
        "sessions": columns["sessions"],
        "rewards": joined_lists([control.rewards for control in controls]),
        "stop_reasons": columns["stop_reasons"],
        "tokens": joined_lists([control.tokens for control in controls]),
        "first_versions": joined_lists([control.first_versions for control in controls]),
        "last_versions": joined_lists([control.last_versions for control in controls]),
        "parts": joined_lists([control.parts for control in controls]),
        "payload": None,
    }


def _referring(control: ControlRecord) -> bytearray:
    if not isinstance(control, SessionsDone | Partials):
        raise ValueError(f"a record of type {control.type.name} refers to no payload")
    return prepare_referring_record(control.type, key=control.key(), fields=record_fields(control))
