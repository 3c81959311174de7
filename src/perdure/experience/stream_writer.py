"""One stream of one incarnation while it is written: the open segment and its chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from perdure.core.errors import StorageError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import IncarnationNumber
from perdure.core.record_codec import record_fields
from perdure.core.record_types import Stream
from perdure.core.records import SegmentOpened
from perdure.core.storage_api import AppendFile, Storage
from perdure.experience.commit_checksums import update_held
from perdure.experience.format import Record, Stamp, prepare_record, stamp_record
from perdure.experience.scan import Span
from perdure.experience.segments import SegmentName

_JOINED_BYTES = 2**18
"""A batch up to this size is handed over in one piece: many small ones cost more than a copy."""


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """Whose stream it is."""

    run_id: str
    incarnation: IncarnationNumber
    stream: Stream


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """Where a batch landed: per record its first byte, its end and its checksum."""

    segment: int
    offsets: list[int]
    ends: list[int]
    checksums: list[int]


class StreamWriter:
    """Appends batches to one stream, one at a time: ``write``, then ``sync`` or ``abandon``.

    Attributes:
        durable_records: Number of records of this stream that are durable.
        spans: What counts of the segments before the open one.
    """

    def __init__(
        self, storage: Storage, *, identity: StreamIdentity, segment_bytes: int, faults: FaultHook
    ) -> None:
        self._storage = storage
        self._identity = identity
        self._segment_bytes = segment_bytes
        self._faults = faults
        self._file: AppendFile | None = None
        self._segment = -1
        self._durable_upto = 0
        self._durable_here = 0
        self._hash = xxhash.xxh3_64()
        self._unsynced_hash = self._hash
        self._unsynced_bytes = 0
        self._unsynced_records = 0
        self.durable_records = 0
        self.spans: list[Span] = []

    def write(self, records: Sequence[Record], *, other_durable: int) -> WrittenBatch:
        """Stamp the records and append them as one batch, in a new segment if this one is full.

        Raises:
            StorageError: The storage refused; call :meth:`abandon`.
        """
        if self._durable_upto >= self._segment_bytes:
            self.abandon()
        if self._file is None:
            self._file = self._open_segment()
        opening = [self._opening()] if self._durable_upto == 0 else []
        batch = [*opening, *records]
        last = len(batch) - 1
        incarnation, lsn = self._identity.incarnation, self.durable_records
        offset = durable_upto = self._durable_upto
        offsets: list[int] = []
        checksums: list[int] = []
        whole = self._unsynced_hash = self._hash.copy()
        size = sum(map(len, batch))
        large = size > _JOINED_BYTES
        for index, record in enumerate(batch):
            stamp = Stamp(incarnation, index == last, lsn + index, durable_upto, other_durable)
            checksums.append(stamp_record(record, stamp))
            if large:
                # Now it is in the caches of this core.
                update_held(whole, record)
            offsets.append(offset)
            offset += len(record)
        pieces = list(map(memoryview, batch)) if large else [b"".join(batch)]
        if not large:
            update_held(whole, pieces[0])
        self._unsynced_bytes = size
        self._unsynced_records = len(batch)
        at = self._file.append(pieces)
        assert at == self._durable_upto
        first = len(opening)
        ends = [*offsets[first + 1 :], offset]
        return WrittenBatch(self._segment, offsets[first:], ends, checksums[first:])

    def sync(self) -> None:
        """Make the written batch durable.

        Raises:
            StorageError: The sync failed; call :meth:`abandon`.
        """
        assert self._file is not None
        self._file.sync()
        self._hash = self._unsynced_hash
        self._durable_upto += self._unsynced_bytes
        self._durable_here += self._unsynced_records
        self.durable_records += self._unsynced_records

    def abandon(self) -> None:
        """Leave the open segment as it is; the next batch starts a new one chained to its end."""
        if self._file is None:
            return
        file, self._file = self._file, None
        if self._durable_upto:
            checksum = self._hash.intdigest()
            span = Span(self._name(), self._durable_upto, self._durable_here, checksum)
            self.spans.append(span)
        self._hash = xxhash.xxh3_64()
        self._durable_upto = self._durable_here = 0
        file.close()

    def _name(self) -> SegmentName:
        return SegmentName(self._identity.incarnation, self._identity.stream, self._segment)

    def _open_segment(self) -> AppendFile:
        while True:
            self._segment += 1
            try:
                file = self._storage.create_append(self._name().path)
            except FileExistsError:
                # Left by an own create that failed half-way; nothing in it counts.
                continue
            except StorageError:
                # The number is used again: segment numbers have no gaps.
                self._segment -= 1
                raise
            self._faults.reach(FaultPoint.LOG_SEGMENT_OPENED)
            return file

    def _opening(self) -> bytearray:
        previous = self.spans[-1] if self.spans else None
        record = SegmentOpened(
            self._identity.run_id,
            self._identity.incarnation,
            self._identity.stream,
            self._segment,
            previous_segment=previous.name.segment if previous else -1,
            previous_length=previous.valid_end if previous else 0,
            previous_checksum=previous.checksum if previous else 0,
        )
        return prepare_record(record.type, key=record.key(), fields=record_fields(record))
