"""The kept lineage: the records that the newest incarnation stands on, and which are void."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from perdure.audit.reader import RunLog
from perdure.audit.report import Findings
from perdure.audit.schema import (
    CHECKPOINTED,
    DECISIONS,
    KEYS,
    OPENED,
    PARTIALS,
    ROW_COLUMNS,
    STARTED,
    TOOL_RESULT,
    canonical,
    misfit,
    partial_key,
    session_key,
)
from perdure.audit.segments import Record, Segment

LINEAGE_RULE = "every incarnation goes on from the newest one before it that started"
BASE_RULE = "a base position is the end of a record of an ancestor"
CALL_RULE = "a tool call whose result is journaled is not made again"
REPEAT_RULE = "an append that is repeated under its key says the same again"

Fields = Mapping[str, Any]
Position = tuple[int, int, int]
"""Incarnation, segment, offset of the end of a control record."""

_MAY_DIFFER = ("timings_s", "payload")
"""Fields in which two records of one key may differ: wall-clock times and places."""


class Event(NamedTuple):
    """A control record of the kept lineage, its first of its key.

    ``rows`` are those that no earlier record counted, in a record that has rows.
    """

    type: int
    fields: Fields
    position: Position
    void: bool
    """A rewind took the decision back; only that it was made once still counts."""
    where: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """The kept lineage of a run.

    Attributes:
        events: In order, void ones included.
        lineage: Incarnations, oldest first.
        positions: Ends of all control records of the lineage.
        repeated: Records that only repeat an earlier one's key; of those with rows, rows.
    """

    events: tuple[Event, ...]
    lineage: tuple[int, ...]
    positions: frozenset[Position]
    repeated: int

    def kept(self) -> Iterator[Event]:
        """Events that are not void."""
        return (event for event in self.events if not event.void)


def read_history(log: RunLog, findings: Findings) -> History:
    """Follow the lineage, leave out what it leaves out, and check keys and fields."""
    events = {number: list(_events(log, number, findings)) for number in log.incarnations}
    ends = {number: _ends(log, number) for number in log.incarnations}
    lineage = _lineage(events, findings)
    starts = {number: events[number][0] for number in lineage}
    limits = _limits(starts, ends, findings)
    counted = _Counted(findings)
    ordered: list[Event] = []
    for number in lineage:
        for event in events[number]:
            limit = limits.get(number)
            if event.type in DECISIONS and limit is not None and _stands(event) > limit:
                ordered.append(event._replace(void=True))
                continue
            fresh = counted.fresh(event)
            if fresh is not None:
                ordered.append(fresh)
    positions = frozenset(position for number in lineage for position in ends[number])
    return History(tuple(ordered), tuple(lineage), positions, counted.repeated)


class _Counted:
    """The first record of every key, and the first row of every key of rows."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._records: dict[str, Event] = {}
        self._rows: dict[tuple[int, ...], tuple[Event, int]] = {}
        self.repeated = 0

    def fresh(self, event: Event) -> Event | None:
        """What of a record counts; None if all of it only repeats."""
        if event.type in ROW_COLUMNS:
            return self._fresh_rows(event)
        key = KEYS[event.type](event.fields)
        earlier = self._records.setdefault(key, event)
        if earlier is event:
            return event
        if event.type == TOOL_RESULT:
            what = f"{key} was journaled before at {earlier.where}"
            self._findings.violation(event.where, what, CALL_RULE)
        same = [
            {name: value for name, value in record.fields.items() if name not in _MAY_DIFFER}
            for record in (earlier, event)
        ]
        self._check_repeat(key, earlier, event, says=same)
        return None

    def _fresh_rows(self, event: Event) -> Event | None:
        fresh: list[int] = []
        for row in range(len(event.fields["sessions"])):
            earlier, its_row = self._rows.setdefault(_row_identity(event, row), (event, row))
            if earlier is event:
                fresh.append(row)
                continue
            same = [
                {name: record.fields[name][at] for name in ROW_COLUMNS[event.type]}
                for record, at in ((earlier, its_row), (event, row))
            ]
            self._check_repeat(_row_key(event, row), earlier, event, says=same)
        return event._replace(rows=tuple(fresh)) if fresh else None

    def _check_repeat(
        self, key: str, earlier: Event, event: Event, *, says: list[dict[str, Any]]
    ) -> None:
        self.repeated += 1
        if canonical(says[0]) != canonical(says[1]):
            self._findings.violation(
                event.where,
                f"{key} differs from its first record at {earlier.where}",
                REPEAT_RULE,
            )


def _row_identity(event: Event, row: int) -> tuple[int, ...]:
    fields = event.fields
    if event.type == PARTIALS:
        return (*fields["sessions"][row], fields["attempts"][row], fields["starts"][row])
    return tuple(fields["sessions"][row])


def _row_key(event: Event, row: int) -> str:
    if event.type == PARTIALS:
        return f"partial/{partial_key(event.fields, row)}"
    return f"session_done/{session_key(event.fields['sessions'][row])}"


def _events(log: RunLog, number: int, findings: Findings) -> Iterator[Event]:
    for segment, records in log.incarnations[number].control.parts:
        for record in records:
            if record.type == OPENED:
                continue
            where = f"{segment.where} byte {record.offset}"
            fields = _fields(segment, record, findings, where=where)
            if fields is not None:
                position = (number, segment.number, record.end)
                yield Event(record.type, fields, position, void=False, where=where)


def _fields(segment: Segment, record: Record, findings: Findings, *, where: str) -> Fields | None:
    fields = segment.fields(record)
    if fields is None:
        findings.damage(where, "its fields are not a map", "fields are a msgpack map")
        return None
    problem = misfit(record.type, fields)
    if problem:
        findings.violation(where, problem, "records have the fields of their type")
        return None
    key = KEYS[record.type](fields)
    if xxhash.xxh3_64_intdigest(key.encode()) != record.key_hash:
        findings.violation(
            where, f"its header has another key than {key}", "keys follow the fields"
        )
    if fields.get("incarnation", segment.incarnation) != segment.incarnation:
        findings.violation(
            where,
            f"it says incarnation {fields['incarnation']}",
            "a record names the incarnation that wrote it",
        )
    return fields


def _stands(event: Event) -> Position:
    """Where a decision belongs: its own end; a checkpoint where its state was staged."""
    if event.type == CHECKPOINTED:
        incarnation, segment, offset = event.fields["position"]
        return incarnation, segment, offset
    return event.position


def _lineage(events: Mapping[int, list[Event]], findings: Findings) -> list[int]:
    """Incarnations from the oldest ancestor to the newest that started."""
    started: list[int] = []
    parents: dict[int, int] = {}
    for number, records in sorted(events.items()):
        if not records:
            continue
        if records[0].type != STARTED or any(event.type == STARTED for event in records[1:]):
            findings.violation(
                f"incarnation {number}",
                "its first record does not name its parent, or another one does too",
                "an incarnation starts once, before anything else",
            )
            continue
        parents[number] = records[0].fields["parent"]
        newest = started[-1] if started else 0
        if parents[number] != newest:
            findings.violation(
                records[0].where,
                f"incarnation {number} goes on from {parents[number]} and leaves out {newest}",
                LINEAGE_RULE,
            )
        started.append(number)
    lineage: list[int] = []
    number = started[-1] if started else 0
    while number in parents and number not in lineage:
        lineage.append(number)
        number = parents[number]
    return lineage[::-1]


def _limits(
    starts: Mapping[int, Event], ends: Mapping[int, set[Position]], findings: Findings
) -> dict[int, Position]:
    """Where the decisions of each incarnation end that its descendants keep."""
    limits: dict[int, Position] = {}
    ancestors: list[int] = []
    for number, start in starts.items():
        base = start.fields.get("base_position")
        if base is not None:
            if not any(tuple(base) in ends[ancestor] for ancestor in ancestors):
                findings.violation(start.where, f"it goes back to {base}", BASE_RULE)
            for ancestor in ancestors:
                limits[ancestor] = min(limits.get(ancestor, tuple(base)), tuple(base))
        ancestors.append(number)
    return limits


def _ends(log: RunLog, number: int) -> set[Position]:
    """Ends of the control records of an incarnation."""
    return {
        (number, segment.number, record.end)
        for segment, records in log.incarnations[number].control.parts
        for record in records
    }
