"""Which records of a stream count: head and tail, the chain of segments, the seal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure.audit.report import Findings
from perdure.audit.segments import (
    CONTROL_TYPES,
    PAYLOAD_TYPES,
    SEGMENT_OPENED,
    Record,
    Segment,
    StreamName,
)

CHAIN_RULE = "a segment names the one it continues from, with the length and checksum that count"
OPENED_RULE = "a segment begins with a SegmentOpened record that agrees with its file name"
WATERMARK_RULE = "what a record says was durable is never cut off"
SEAL_RULE = "a sealed segment keeps its bytes up to its sealed end"


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """What a seal says of one segment."""

    valid_end: int
    records: int
    checksum: str


@dataclass(frozen=True, slots=True)
class StreamLog:
    """A stream of one incarnation.

    Attributes:
        parts: Segments that count, in order, each with its records that count.
        other_durable: Largest count of records of the other stream that a record names as durable.
        tail_bytes: Never acknowledged bytes at the end, cut off by a crash.
        fenced_bytes: Bytes beyond the seal.
    """

    parts: tuple[tuple[Segment, tuple[Record, ...]], ...]
    other_durable: int = 0
    tail_bytes: int = 0
    fenced_bytes: int = 0

    @property
    def count(self) -> int:
        return sum(len(records) for _, records in self.parts)


class StreamReader:
    """Applies the rules of the page's "Damage and tail" to the segments of one stream."""

    def __init__(
        self,
        segments: Mapping[int, Segment],
        *,
        stream: StreamName,
        incarnation: int,
        run_id: str,
        seal: Mapping[int, SealedSegment] | None,
        findings: Findings,
    ) -> None:
        self._segments = segments
        self._stream: StreamName = stream
        self._incarnation = incarnation
        self._run_id = run_id
        self._seal = seal
        self._findings = findings
        self._label = f"log/{stream}-{incarnation:06d}"

    def read(self) -> StreamLog:
        """The records that count. What is wrong goes to the findings."""
        before = len(self._findings.all)
        self._check_numbers()
        ends = self._ends() if self._seal is None else self._sealed_ends(self._seal)
        head = max((number for number, end in ends.items() if end), default=-1)
        counted = self._follow_chain(head, ends)
        for number, segment in self._segments.items():
            if segment.watermark > counted.get(number, 0):
                self._findings.damage(
                    segment.where,
                    f"{segment.watermark} bytes were durable, {counted.get(number, 0)} count",
                    WATERMARK_RULE,
                )
        parts = tuple(
            (self._segments[number], self._counted_records(self._segments[number], length))
            for number, length in sorted(counted.items())
        )
        if len(self._findings.all) == before:
            self._check_sequence(parts)
        return StreamLog(
            parts=parts,
            other_durable=self._other_durable(parts),
            tail_bytes=sum(
                segment.size - ends.get(number, 0)
                for number, segment in self._segments.items()
                if self._seal is None and number >= head
            ),
            fenced_bytes=sum(
                segment.size - ends.get(number, 0)
                for number, segment in self._segments.items()
                if self._seal is not None
            ),
        )

    def _check_numbers(self) -> None:
        highest = max((*self._segments, *(self._seal or ())), default=-1)
        for number in sorted(set(range(highest + 1)) - self._segments.keys()):
            self._findings.damage(
                f"{self._label}-{number:06d}.plog",
                "the segment is missing",
                "segments are never deleted",
            )

    def _ends(self) -> dict[int, int]:
        """Ends of the last complete batches."""
        return {number: segment.end for number, segment in self._segments.items()}

    def _sealed_ends(self, seal: Mapping[int, SealedSegment]) -> dict[int, int]:
        ends: dict[int, int] = {}
        for number, sealed in seal.items():
            segment = self._segments.get(number)
            if segment is None:
                continue
            records = [record for record in segment.records if record.end <= sealed.valid_end]
            end = records[-1].end if records else 0
            whole = end == sealed.valid_end and (not records or records[-1].last_of_batch)
            checksum = f"{segment.checksum(sealed.valid_end):016x}"
            if segment.size < sealed.valid_end or checksum != sealed.checksum:
                self._findings.damage(
                    segment.where,
                    f"the first {sealed.valid_end} bytes are not the sealed ones",
                    SEAL_RULE,
                )
            elif not whole or len(records) != sealed.records:
                self._findings.damage(
                    segment.where,
                    f"{len(records)} records end at byte {end}, the seal says {sealed.records}"
                    f" at {sealed.valid_end}",
                    SEAL_RULE,
                )
            ends[number] = sealed.valid_end
        return ends

    def _follow_chain(self, head: int, ends: Mapping[int, int]) -> dict[int, int]:
        """Bytes that count, by segment, from the head back to the first."""
        counted: dict[int, int] = {}
        number, length, checksum = head, ends.get(head, 0), None
        while number >= 0:
            segment = self._segments.get(number)
            if segment is None or segment.size < length:
                self._findings.damage(
                    f"{self._label}-{number:06d}.plog",
                    f"shorter than the {length} bytes that a later segment continues from",
                    CHAIN_RULE,
                )
                break
            if checksum is not None and segment.checksum(length) != checksum:
                self._findings.damage(
                    segment.where,
                    f"the first {length} bytes are not those that a later segment continues from",
                    CHAIN_RULE,
                )
                break
            counted[number] = length
            opened = self._opened(segment)
            if opened is None:
                break
            previous = opened["previous_segment"]
            if previous >= number or (previous >= 0 and not self._in_seal(previous, opened)):
                self._findings.damage(
                    segment.where, f"continues from segment {previous}", CHAIN_RULE
                )
                break
            number, length = previous, opened["previous_length"]
            checksum = opened["previous_checksum"]
        return counted

    def _in_seal(self, previous: int, opened: Mapping[str, Any]) -> bool:
        """Whether the part of a segment that a later one continues from is inside the seal."""
        if self._seal is None:
            return True
        sealed = self._seal.get(previous)
        return sealed is not None and opened["previous_length"] <= sealed.valid_end

    def _opened(self, segment: Segment) -> dict[str, Any] | None:
        """Fields of the segment's first record, which must fit its file name."""
        fields = (segment.fields(segment.records[0]) or {}) if segment.records else {}
        names = ("run_id", "incarnation", "stream", "segment")
        expected = (self._run_id, self._incarnation, self._stream, segment.number)
        numbers = ("previous_segment", "previous_length", "previous_checksum")
        if tuple(fields.get(name) for name in names) == expected and all(
            type(fields.get(name)) is int for name in numbers
        ):
            return fields
        self._findings.damage(
            segment.where, "its first record does not say that it is this segment", OPENED_RULE
        )
        return None

    def _counted_records(self, segment: Segment, length: int) -> tuple[Record, ...]:
        if length == segment.end:
            return segment.records
        records = tuple(record for record in segment.records if record.end <= length)
        if not records or records[-1].end != length or not records[-1].last_of_batch:
            self._findings.damage(
                segment.where, f"byte {length} is not the end of a complete batch", CHAIN_RULE
            )
        return records

    def _check_sequence(self, parts: tuple[tuple[Segment, tuple[Record, ...]], ...]) -> None:
        types = CONTROL_TYPES if self._stream == "control" else PAYLOAD_TYPES
        expected = 0
        for segment, records in parts:
            for record in records:
                problem = ""
                if record.lsn != expected:
                    problem = f"record {record.lsn} where record {expected} belongs"
                elif record.incarnation != self._incarnation:
                    problem = f"a record of incarnation {record.incarnation}"
                elif record.type not in types:
                    problem = f"a record of type {record.type} in the {self._stream} stream"
                elif (record.type == SEGMENT_OPENED) != (record.offset == 0):
                    problem = f"a record of type {record.type} at this place"
                if problem:
                    self._findings.damage(
                        f"{segment.where} byte {record.offset}",
                        problem,
                        "the records of a stream follow each other without gaps",
                    )
                expected = record.lsn + 1

    def _other_durable(self, parts: tuple[tuple[Segment, tuple[Record, ...]], ...]) -> int:
        """Beyond a seal nothing is believed: a fenced writer may have gone on in both streams."""
        if self._seal is not None:
            valid = [record for _, records in parts for record in records]
        else:
            segments = self._segments.values()
            valid = [record for s in segments for record in (*s.records, *s.beyond)]
        return max((record.other_durable_lsn for record in valid), default=0)
