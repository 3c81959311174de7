"""The kept lineage as a list of control records: verified, in order, each key once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from perdure.core.errors import DamagedError
from perdure.core.experience_records import Partials, SessionsDone
from perdure.core.ids import IncarnationNumber, LogPosition, PayloadRef, PolicyVersion, SessionId
from perdure.core.record_codec import record_from_fields
from perdure.core.record_types import RecordType, Stream
from perdure.core.records import (
    ControlRecord,
    IncarnationStarted,
    Published,
    is_void,
)
from perdure.core.storage_api import Storage
from perdure.experience.claims import read_run
from perdure.experience.format import ALIGNMENT, decode_header, record_body
from perdure.experience.scan import Extent, Span, Tail, map_segment
from perdure.experience.seals import read_extent
from perdure.experience.segments import SegmentName, damage, read_opening, walk_records

Placed = tuple[LogPosition, ControlRecord]
"""A control record and where it ends."""


@dataclass(frozen=True, slots=True)
class LogReport:
    """What reading took and what did not count.

    Attributes:
        segments: Segment files read.
        records: Control records read, plumbing included.
        bytes: Bytes that count.
        tails: What was cut: never acknowledged, or fenced.
        void: Decisions left out because of a rewind.
        duplicates: Records left out because their key was there before.
    """

    segments: int
    records: int
    bytes: int
    tails: tuple[Tail, ...]
    void: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class LineageLog:
    """The kept control records of a lineage, oldest first; void and repeated ones are left out.

    Attributes:
        lineage: Its incarnations, oldest first.
        used_version: Highest version that was published, in void parts too; 0 if none was.
        end: End of the last control record that counts, kept or not; None for an empty log.
    """

    head: IncarnationNumber
    lineage: tuple[IncarnationNumber, ...]
    records: tuple[Placed, ...]
    used_version: PolicyVersion
    end: LogPosition | None
    report: LogReport


def read_lineage(
    storage: Storage,
    head: IncarnationNumber,
    *,
    verified: Mapping[IncarnationNumber, Extent] = MappingProxyType({}),
) -> LineageLog:
    """Read the kept lineage that ends with incarnation ``head`` (0 gives an empty one).

    Beside a live writer it gives what was complete at one moment during the call.

    Args:
        verified: Sealed incarnations of which the caller has just seen that every byte is right.

    Raises:
        DamagedError: Bytes that count are missing or wrong. Nothing is skipped.
        FutureFormatError: A record was written by a newer version.
    """
    run_id = read_run(storage).run_id
    extents: list[Extent] = []
    starts: list[IncarnationStarted] = []
    control: list[list[Placed]] = []
    number = head
    while number > 0:
        extent = verified.get(number) or read_extent(storage, number, run_id=run_id)
        placed = list(_control_records(storage, extent, run_id=run_id))
        start = _start_of(placed, number)
        extents.insert(0, extent)
        starts.insert(0, start)
        control.insert(0, placed)
        number = start.parent
    placed = [item for part in control for item in part]
    _check_references(storage, extents, placed)
    kept, void, duplicates = kept_records(placed, starts)
    spans = [span for extent in extents for span in extent.control + extent.payload]
    report = LogReport(
        segments=len(spans),
        records=sum(span.records for extent in extents for span in extent.control),
        bytes=sum(span.valid_end for span in spans),
        tails=tuple(tail for extent in extents for tail in extent.tails),
        void=void,
        duplicates=duplicates,
    )
    published = [record.version for _, record in placed if isinstance(record, Published)]
    return LineageLog(
        head,
        lineage=tuple(extent.incarnation for extent in extents),
        records=tuple(kept),
        used_version=max(published, default=PolicyVersion(0)),
        end=placed[-1][0] if placed else None,
        report=report,
    )


def kept_records(
    placed: Iterable[Placed], starts: Sequence[IncarnationStarted]
) -> tuple[list[Placed], int, int]:
    """Leave out void decisions, then records all of whose keys were there before.

    Of sessions that are settled together some may have counted before: the fold looks at each.

    Args:
        placed: Control records of a lineage in order.
        starts: Its ``IncarnationStarted`` records, oldest first.

    Returns:
        The kept records, the number of void ones, the number of repeated ones.
    """
    limits = _void_beyond(starts)
    seen: set[str | SessionId] = set()
    kept: list[Placed] = []
    void = duplicates = 0
    for position, record in placed:
        limit = limits.get(position.incarnation)
        if limit is not None and is_void(record, position, limit):
            void += 1
            continue
        keys = _keys_of(record)
        if seen.issuperset(keys):
            duplicates += 1
            continue
        seen.update(keys)
        kept.append((position, record))
    return kept, void, duplicates


def _keys_of(record: ControlRecord) -> Sequence[str | SessionId]:
    """The idempotency keys of a record: those of its rows, if it has rows."""
    if isinstance(record, SessionsDone):
        return record.sessions
    return record.row_keys() if isinstance(record, Partials) else (record.key(),)


def _void_beyond(starts: Sequence[IncarnationStarted]) -> Mapping[int, LogPosition]:
    """Per incarnation the position beyond which its decisions are void."""
    limits: dict[int, LogPosition] = {}
    limit: LogPosition | None = None
    for start in reversed(starts):
        if limit is not None:
            limits[start.incarnation] = limit
        base = start.base_position
        if base is not None and (limit is None or base < limit):
            limit = base
    return limits


def _control_records(storage: Storage, extent: Extent, *, run_id: str) -> Iterator[Placed]:
    """Control records of an incarnation without plumbing; the bytes have been verified."""
    lsn = 0
    for span in extent.control:
        view = map_segment(storage, span.name, span.valid_end)
        first_lsn = lsn
        for offset, header in walk_records(view, span.name, first_lsn=first_lsn):
            lsn += 1
            if header.type == RecordType.SEGMENT_OPENED:
                read_opening(view, span.name, header, run_id=run_id)
                continue
            try:
                record = record_from_fields(header.type, record_body(view, offset, header))
            except ValueError as error:
                raise damage(
                    span.name, offset, str(error), rule="a control record can be decoded"
                ) from error
            end = offset + header.length
            yield LogPosition(extent.incarnation, span.name.segment, end), record
        _check_count(span, lsn - first_lsn)


def _check_count(span: Span, found: int) -> None:
    if found != span.records:
        raise damage(
            span.name, 0, f"{found} records", rule=f"{span.records} records count in this segment"
        )


def _start_of(placed: Sequence[Placed], incarnation: IncarnationNumber) -> IncarnationStarted:
    first = placed[0][1] if placed else None
    if not isinstance(first, IncarnationStarted) or not first.parent < incarnation:
        raise DamagedError(
            "the control log does not begin with IncarnationStarted of an older parent",
            where=SegmentName(incarnation, Stream.CONTROL, 0).path,
            rule="an incarnation that is continued has started",
            way_out="restore the log from a copy; perdure audit lists everything that is damaged",
        )
    return first


def _check_references(
    storage: Storage, extents: Sequence[Extent], placed: Iterable[Placed]
) -> None:
    views = {
        (span.name.incarnation, span.name.segment): map_segment(storage, span.name, span.valid_end)
        for extent in extents
        for span in extent.payload
    }
    for position, record in placed:
        if not isinstance(record, SessionsDone | Partials):
            continue
        ref = record.payload
        view = views.get((ref.incarnation, ref.segment))
        if view is None or not _leads_to_record(view, ref):
            name = SegmentName(position.incarnation, Stream.CONTROL, position.segment)
            raise damage(
                name,
                position.offset,
                f"the payload of {record.key()} is not at byte {ref.offset} of payload segment"
                f" {ref.segment} of incarnation {ref.incarnation}",
                rule="payload is durable before control refers to it",
            )


def _leads_to_record(view: memoryview, ref: PayloadRef) -> bool:
    header = decode_header(view, ref.offset) if ref.offset % ALIGNMENT == 0 else None
    return header is not None and (header.length, header.checksum) == (ref.length, ref.checksum)
