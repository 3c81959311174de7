"""One segment file: its records, where its last complete batch ends, and what it says was durable.

Written from ``docs/formats/log.md`` alone, so that a mistake of the log's own reader is not
repeated here.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack
import xxhash

from perdure.core.errors import FutureFormatError

StreamName = Literal["control", "payload"]

MAGIC = b"PLOG"
FORMAT = 1
ALIGNMENT = 64
LAST_OF_BATCH = 1
SEGMENT_OPENED = 1
CONTROL_TYPES = frozenset(range(1, 21))
PAYLOAD_TYPES = frozenset((SEGMENT_OPENED, 101, 102, 103))
_HEADER = struct.Struct("<4sHHIIIIQQQQQ")
_CHECKSUM_AT = 56
_NO_CHECKSUM = bytes(8)
_SMALL = 4096
"""Bytes; up to here a record is hashed from one joined copy, which is faster than in pieces."""
_MAP_FROM = 1 << 20
"""Bytes; smaller files are read, since every map holds a file descriptor."""


class Record(NamedTuple):
    """Header of a valid record: the checksum holds and the record lies inside its file."""

    incarnation: int
    segment: int
    offset: int
    end: int
    type: int
    last_of_batch: bool
    lsn: int
    durable_upto: int
    other_durable_lsn: int
    key_hash: int
    checksum: int
    fields_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment file as it was when it was opened.

    Attributes:
        records: Records of the complete batches that are reached from offset 0.
        beyond: Every other valid record: of an incomplete batch, or behind bad bytes.
    """

    path: Path
    stream: StreamName
    incarnation: int
    number: int
    view: memoryview
    records: tuple[Record, ...]
    beyond: tuple[Record, ...]

    @property
    def where(self) -> str:
        return f"log/{self.path.name}"

    @property
    def size(self) -> int:
        return len(self.view)

    @property
    def end(self) -> int:
        """End of the last complete batch."""
        return self.records[-1].end if self.records else 0

    @property
    def watermark(self) -> int:
        """Bytes of this file that some record of it says were durable."""
        return max((record.durable_upto for record in (*self.records, *self.beyond)), default=0)

    def checksum(self, length: int) -> int:
        """xxh3-64 of the first ``length`` bytes."""
        return xxhash.xxh3_64_intdigest(self.view[:length])

    def fields(self, record: Record) -> dict[str, Any] | None:
        """The record's fields; None if they are not a msgpack map with named values."""
        start = record.offset + _HEADER.size
        try:
            value = msgpack.unpackb(self.view[start : start + record.fields_bytes])
        except (ValueError, msgpack.UnpackException):
            return None
        return value if isinstance(value, dict) else None


def read_segment(path: Path, stream: StreamName, *, incarnation: int, number: int) -> Segment:
    """Read a segment; never fails on bad bytes, they only end what is reached.

    Raises:
        FutureFormatError: A valid record was written by a newer version.
    """
    data = _contents(path)
    view = memoryview(data)
    known = CONTROL_TYPES | PAYLOAD_TYPES
    records: list[Record] = []
    complete = offset = 0
    while record := _record_at(view, offset, number=number, where=path.name, known=known):
        records.append(record)
        offset = record.end
        if record.last_of_batch:
            complete = len(records)
    beyond = records[complete:]
    offset = data.find(MAGIC, offset)
    while offset >= 0:
        record = None
        if offset % ALIGNMENT == 0:
            record = _record_at(view, offset, number=number, where=path.name, known=known)
        if record is not None:
            beyond.append(record)
        offset = data.find(MAGIC, record.end if record else offset + 1)
    return Segment(
        path=path,
        stream=stream,
        incarnation=incarnation,
        number=number,
        view=view,
        records=tuple(records[:complete]),
        beyond=tuple(beyond),
    )


def _contents(path: Path) -> bytes | mmap.mmap:
    with path.open("rb") as file:
        if path.stat().st_size < _MAP_FROM:
            return file.read()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _record_at(
    view: memoryview, offset: int, *, number: int, where: str, known: frozenset[int]
) -> Record | None:
    if len(view) - offset < _HEADER.size:
        return None
    magic, version, type_, units, fields_bytes, incarnation, flags, *numbers = _HEADER.unpack_from(
        view, offset
    )
    length = units * ALIGNMENT
    if magic != MAGIC or length < _HEADER.size + fields_bytes or offset + length > len(view):
        return None
    if _checksum(view[offset : offset + length]) != numbers[-1] or version < FORMAT:
        return None
    if version > FORMAT or type_ not in known or flags & ~LAST_OF_BATCH:
        raise FutureFormatError(
            f"record of version {version}, type {type_}, flags {flags} at byte {offset}",
            where=where,
            rule=f"this version reads format {FORMAT}",
            way_out="use the perdure version that wrote it, or a newer one",
        )
    lsn, durable_upto, other_durable_lsn, key_hash, checksum = numbers
    return Record(
        incarnation,
        number,
        offset,
        offset + length,
        type_,
        bool(flags),
        lsn,
        durable_upto,
        other_durable_lsn,
        key_hash,
        checksum,
        fields_bytes,
    )


def _checksum(record: memoryview) -> int:
    before, after = record[:_CHECKSUM_AT], record[_HEADER.size :]
    if len(record) <= _SMALL:
        return xxhash.xxh3_64_intdigest(b"".join((before, _NO_CHECKSUM, after)))
    state = xxhash.xxh3_64(before)
    state.update(_NO_CHECKSUM)
    state.update(after)
    return state.intdigest()
