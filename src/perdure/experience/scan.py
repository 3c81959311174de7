"""Where an unsealed incarnation ends: the rules "Damage and tail" of ``docs/formats/log.md``.

Control is read before payload. Beside a live or fenced writer, which writes payload first, every
reference that is seen can then be followed.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from perdure.core.errors import DamagedError
from perdure.core.ids import IncarnationNumber
from perdure.core.record_types import Stream
from perdure.core.records import SegmentOpened
from perdure.core.storage_api import Storage
from perdure.experience.format import RecordHeader, parse_record
from perdure.experience.segments import (
    SegmentName,
    SegmentScan,
    check_place,
    damage,
    read_opening,
    scan_segment,
    segments_of,
    valid_end,
    walk_records,
    wrong_checksum,
)


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a segment that counts, verified: bytes 0 to ``valid_end``."""

    name: SegmentName
    valid_end: int
    records: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Tail:
    """Bytes of a segment that do not count: never acknowledged, or fenced."""

    name: SegmentName
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Extent:
    """What counts of an incarnation's log, in order, and what was cut."""

    incarnation: IncarnationNumber
    control: tuple[Span, ...]
    payload: tuple[Span, ...]
    tails: tuple[Tail, ...]
    sealed: bool


@dataclass(frozen=True, slots=True)
class _StreamScan:
    end: tuple[SegmentName, int]
    """Where what counts is followed by something else; the end of the newest segment if by nothing.
    """
    spans: tuple[Span, ...]
    tails: tuple[Tail, ...]
    other_durable: int

    @property
    def records(self) -> int:
        return sum(span.records for span in self.spans)


def scan_incarnation(storage: Storage, incarnation: IncarnationNumber, *, run_id: str) -> Extent:
    """Find the end of an unsealed incarnation by reading all of its segments.

    Raises:
        DamagedError: Durable bytes are missing or wrong.
    """
    control = _scan_stream(storage, incarnation, Stream.CONTROL, run_id=run_id)
    payload = _scan_stream(storage, incarnation, Stream.PAYLOAD, run_id=run_id)
    _require_records(payload, promised_by=control)
    if payload.other_durable > control.records:
        again = _scan_stream(storage, incarnation, Stream.CONTROL, run_id=run_id)
        _require_records(again, promised_by=payload)
    tails = control.tails + payload.tails
    return Extent(incarnation, control.spans, payload.spans, tails, sealed=False)


def map_segment(storage: Storage, name: SegmentName, length: int | None = None) -> memoryview:
    """The first ``length`` bytes of a segment (all by default), memory-mapped.

    Raises:
        DamagedError: The file is missing or shorter.
    """
    try:
        view = storage.map(name.path).data
    except FileNotFoundError as error:
        raise damage(name, 0, "the file is missing", rule="segments are kept") from error
    if length is None:
        return view
    if len(view) < length:
        raise damage(name, len(view), f"{len(view)} bytes", rule=f"at least {length} were durable")
    return view[:length]


def stream_segments(
    storage: Storage, incarnation: IncarnationNumber, stream: Stream
) -> list[SegmentName]:
    """Segments of a stream that exist, by number.

    Raises:
        DamagedError: A number below the highest is missing.
    """
    found = {name.segment: name for name in segments_of(storage, incarnation, [stream])}
    for number in range(max(found, default=-1)):
        if number not in found:
            missing = SegmentName(incarnation, stream, number)
            raise damage(missing, 0, "the file is missing", rule="segment numbers have no gaps")
    return list(found.values())


def _scan_stream(
    storage: Storage, incarnation: IncarnationNumber, stream: Stream, *, run_id: str
) -> _StreamScan:
    end = (SegmentName(incarnation, stream, 0), 0)
    tails: list[Tail] = []
    other_durable = 0
    names = stream_segments(storage, incarnation, stream)
    for name in reversed(names):
        view = map_segment(storage, name)
        scan = scan_segment(view, name)
        if scan.end < scan.watermark:
            raise damage(
                name,
                valid_end(view, scan.end),
                "no valid record",
                rule=f"{scan.watermark} bytes of this segment were durable",
            )
        other_durable = max(other_durable, scan.other_durable)
        if name == names[-1] or scan.size > scan.end:
            end = (name, valid_end(view, scan.end))
        if scan.size > scan.end:
            tails.append(Tail(name, scan.end, scan.size - scan.end))
        if scan.records:
            opening = read_opening(view, name, scan.records[0][1], run_id=run_id)
            spans, more_tails = _follow_chain(storage, opening, run_id=run_id)
            first_lsn = sum(span.records for span in spans)
            _check_head(scan, name, first_lsn=first_lsn)
            head = Span(name, scan.end, len(scan.records), _checksum(view[: scan.end]))
            all_tails = (*more_tails, *reversed(tails))
            return _StreamScan(end, (*spans, head), all_tails, other_durable)
    return _StreamScan(end, (), tuple(reversed(tails)), other_durable)


def _follow_chain(
    storage: Storage, opening: SegmentOpened, *, run_id: str
) -> tuple[list[Span], list[Tail]]:
    """Spans of the segments before the one that ``opening`` opens, oldest first."""
    links: list[tuple[SegmentOpened, memoryview]] = []
    tails: list[Tail] = []
    while opening.previous_segment >= 0:
        here = SegmentName(opening.incarnation, opening.stream, opening.segment)
        if opening.previous_segment >= opening.segment:
            raise damage(here, 0, "continues from a later segment", rule="the chain goes back")
        for number in range(opening.segment - 1, opening.previous_segment, -1):
            abandoned = SegmentName(here.incarnation, here.stream, number)
            tails.append(Tail(abandoned, 0, len(map_segment(storage, abandoned))))
        name = SegmentName(here.incarnation, here.stream, opening.previous_segment)
        whole = map_segment(storage, name)
        view = map_segment(storage, name, opening.previous_length)
        if _checksum(view) != opening.previous_checksum:
            raise wrong_checksum(name, view, rule=f"{here.file} records another one")
        if len(whole) > len(view):
            tails.append(Tail(name, len(view), len(whole) - len(view)))
        links.append((opening, view))
        header = _first_header(view, name)
        opening = read_opening(view, name, header, run_id=run_id)
    spans: list[Span] = []
    lsn = 0
    for link, view in reversed(links):
        name = SegmentName(link.incarnation, link.stream, link.previous_segment)
        records = sum(1 for _ in walk_records(view, name, first_lsn=lsn))
        spans.append(Span(name, len(view), records, link.previous_checksum))
        lsn += records
    return spans, tails[::-1]


def _first_header(view: memoryview, name: SegmentName) -> RecordHeader:
    header = parse_record(view, 0, where=name.path)
    if header is None:
        raise damage(name, 0, "no record starts here", rule="a segment starts with SegmentOpened")
    return header


def _check_head(scan: SegmentScan, name: SegmentName, *, first_lsn: int) -> None:
    for lsn, (offset, header) in enumerate(scan.records, first_lsn):
        check_place(header, name, offset=offset, lsn=lsn)


def _require_records(found: _StreamScan, *, promised_by: _StreamScan) -> None:
    if found.records < promised_by.other_durable:
        name, offset = found.end
        raise DamagedError(
            f"the {name.stream.value} stream ends after {found.records} records",
            where=f"{name.path} at byte {offset}",
            rule=f"{promised_by.other_durable} were durable",
            way_out="restore the log from a copy; perdure audit lists everything that is damaged",
        )


def _checksum(view: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(view)
