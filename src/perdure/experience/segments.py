"""Segment files: their names, and reading the records of one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from perdure.core.errors import DamagedError
from perdure.core.ids import IncarnationNumber
from perdure.core.record_codec import record_from_fields
from perdure.core.record_types import RecordType, Stream
from perdure.core.records import SegmentOpened
from perdure.core.storage_api import Storage
from perdure.experience.format import (
    ALIGNMENT,
    MAGIC,
    RecordHeader,
    checksum_holds,
    decode_header,
    parse_record,
    record_body,
)

LOG_DIR = "log"
_FILE_NAME = re.compile(r"(control|payload)-(\d{6,})-(\d{6,})\.plog")
_MAGIC_WORD = np.frombuffer(MAGIC, "<u4")[0]


@dataclass(frozen=True, slots=True)
class SegmentName:
    """Which segment a file holds."""

    incarnation: IncarnationNumber
    stream: Stream
    segment: int

    @property
    def file(self) -> str:
        return f"{self.stream.value}-{self.incarnation:06d}-{self.segment:06d}.plog"

    @property
    def path(self) -> str:
        return f"{LOG_DIR}/{self.file}"

    @classmethod
    def parse(cls, file: str) -> SegmentName | None:
        """Read :attr:`file` back; None if the name is not of that form."""
        match = _FILE_NAME.fullmatch(file)
        if match is None:
            return None
        name = cls(IncarnationNumber(int(match[2])), Stream(match[1]), int(match[3]))
        return name if name.file == file else None


def segments_of(
    storage: Storage, incarnation: IncarnationNumber, streams: Sequence[Stream] = tuple(Stream)
) -> list[SegmentName]:
    """Segments of an incarnation that exist, by stream and number."""
    prefixes = tuple(f"{stream.value}-{incarnation:06d}-" for stream in streams)
    files = (file for file in storage.list(LOG_DIR) if file.startswith(prefixes))
    names = [name for file in files if (name := SegmentName.parse(file)) is not None]
    return sorted(names, key=lambda name: (name.stream.value, name.segment))


@dataclass(frozen=True, slots=True)
class SegmentScan:
    """What reading a segment from offset 0 found.

    Attributes:
        records: Offset and header of the records of complete batches.
        end: End of the last complete batch.
        watermark: Largest ``durable_upto`` of any valid record, also beyond bad bytes.
        other_durable: Largest ``other_durable_lsn`` of any valid record.
        size: Bytes in the file.
    """

    records: list[tuple[int, RecordHeader]]
    end: int
    watermark: int
    other_durable: int
    size: int


def scan_segment(view: memoryview, name: SegmentName) -> SegmentScan:
    """Read a segment, verifying every checksum. Decides nothing about damage."""
    records: list[tuple[int, RecordHeader]] = []
    batch: list[tuple[int, RecordHeader]] = []
    offset = end = watermark = other_durable = 0
    where = name.path
    while (header := parse_record(view, offset, where=where)) is not None:
        watermark = max(watermark, header.durable_upto)
        other_durable = max(other_durable, header.other_durable_lsn)
        batch.append((offset, header))
        offset += header.length
        if header.last_of_batch:
            records += batch
            batch.clear()
            end = offset
    for header in _valid_records_beyond(view, offset, name):
        watermark = max(watermark, header.durable_upto)
        other_durable = max(other_durable, header.other_durable_lsn)
    return SegmentScan(records, end, watermark, other_durable, len(view))


def _valid_records_beyond(
    view: memoryview, start: int, name: SegmentName
) -> Iterator[RecordHeader]:
    usable = len(view) // ALIGNMENT * ALIGNMENT
    if usable <= start:
        return
    words = np.frombuffer(view[start:usable], "<u4")[:: ALIGNMENT // 4]
    next_offset = start
    for index in np.flatnonzero(words == _MAGIC_WORD):
        offset = start + int(index) * ALIGNMENT
        if offset < next_offset:
            continue
        header = parse_record(view, offset, where=name.path)
        if header is not None:
            next_offset = offset + header.length
            yield header


def walk_records(
    view: memoryview, name: SegmentName, *, first_lsn: int
) -> Iterator[tuple[int, RecordHeader]]:
    """Offset and header of every record of bytes whose checksum has been verified.

    Raises:
        DamagedError: The bytes are not a chain of records of this incarnation from ``first_lsn``.
    """
    offset = 0
    lsn = first_lsn
    while offset < len(view):
        header = decode_header(view, offset)
        if header is None:
            raise damage(name, offset, "no record starts here", rule="records lie back to back")
        check_place(header, name, offset=offset, lsn=lsn)
        yield offset, header
        offset += header.length
        lsn += 1


def valid_end(view: memoryview, start: int) -> int:
    """Where the valid records that lie back to back from ``start`` on end."""
    offset = start
    while offset < len(view):
        header = decode_header(view, offset)
        if header is None or not checksum_holds(view, offset, header):
            break
        offset += header.length
    return offset


def wrong_checksum(name: SegmentName, view: memoryview, *, rule: str) -> DamagedError:
    """The error for bytes that have another checksum than they had; names the first bad record."""
    end = valid_end(view, 0)
    # If every record is valid, the segment is another one from its start.
    return damage(name, end if end < len(view) else 0, "wrong checksum", rule=rule)


def check_place(header: RecordHeader, name: SegmentName, *, offset: int, lsn: int) -> None:
    """Check that a record that counts belongs where it lies.

    Raises:
        DamagedError: Wrong incarnation, LSN, or type for the place.
    """
    if header.incarnation != name.incarnation:
        raise damage(
            name,
            offset,
            f"the record belongs to incarnation {header.incarnation}",
            rule="a segment holds records of its own incarnation",
        )
    if header.lsn != lsn:
        raise damage(
            name,
            offset,
            f"record number {header.lsn} follows number {lsn - 1}",
            rule="record numbers of a stream rise by one",
        )
    if (header.type == RecordType.SEGMENT_OPENED) != (offset == 0):
        raise damage(
            name,
            offset,
            f"a record of type {header.type} does not belong here",
            rule="SegmentOpened is the first record of a segment and no other",
        )


def read_opening(
    view: memoryview, name: SegmentName, header: RecordHeader, *, run_id: str
) -> SegmentOpened:
    """The valid first record of a segment.

    Raises:
        DamagedError: It is not a ``SegmentOpened`` that agrees with the file name and the run.
    """
    try:
        record = record_from_fields(header.type, record_body(view, 0, header))
    except ValueError as error:
        raise damage(name, 0, str(error), rule="a segment starts with SegmentOpened") from error
    if not isinstance(record, SegmentOpened):
        raise damage(name, 0, "not SegmentOpened", rule="a segment starts with SegmentOpened")
    told = SegmentName(record.incarnation, record.stream, record.segment)
    if told != name or record.run_id != run_id:
        raise damage(
            name,
            0,
            f"the file says it is {told.file} of run {record.run_id}",
            rule=f"it must be itself, of run {run_id}",
        )
    return record


def damage(name: SegmentName, offset: int, what: str, *, rule: str) -> DamagedError:
    """The error for damaged bytes in a segment."""
    return DamagedError(
        what,
        where=f"{name.path} at byte {offset}",
        rule=rule,
        way_out="restore the file from a copy; perdure audit lists everything that is damaged",
    )
