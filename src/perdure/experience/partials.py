"""Partial tokens of unfinished sessions: to payload records and back. N tokens of a piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from perdure.core.errors import DamagedError
from perdure.core.experience_records import Partials
from perdure.core.ids import GroupId, PolicyVersion, SessionId
from perdure.core.record_types import RecordType, Stream
from perdure.core.trajectories import (
    Array,
    PartialDelta,
    Segment,
    SessionPrefix,
    joined_segments,
)
from perdure.experience import entries
from perdure.experience.entries import Entry
from perdure.experience.finished import NOT_PLACED
from perdure.experience.format import decode_header, prepare_record, record_arrays, record_body
from perdure.experience.payloads import (
    IDS,
    LOGPROBS,
    MASK,
    Payload,
    PayloadReader,
    numbers_of,
    require_arrays,
    require_numbers,
)
from perdure.experience.segments import SegmentName
from perdure.experience.unfinished import PartialBatch


def require_loggable_delta(delta: PartialDelta) -> None:
    """See that a piece can be logged.

    Raises:
        TypeError, ValueError: An array or a number is not what a record can hold.
    """
    arrays = ((delta.token_ids_N, IDS), (delta.logprobs_N, LOGPROBS), (delta.loss_mask_N, MASK))
    require_arrays(delta.session, arrays)
    numbers = (delta.start, delta.attempt, *numbers_of(delta.segments))
    require_numbers(delta.session, numbers)
    delta.check()


def require_loggable_deltas(deltas: Sequence[PartialDelta]) -> None:
    """See that pieces can be logged in one batch.

    Raises:
        TypeError, ValueError: One is not what a record can hold, or a session occurs twice.
    """
    for delta in deltas:
        require_loggable_delta(delta)
    if len({delta.session for delta in deltas}) < len(deltas):
        raise ValueError("a session occurs twice among partial tokens")


def partial_entries(deltas: Iterable[PartialDelta]) -> list[Entry]:
    """Entries with the pieces in order, none above the limits of a record; no piece is empty."""
    return [_entry(some) for some in _portions(deltas)]


def _portions(deltas: Iterable[PartialDelta]) -> Iterator[list[PartialDelta]]:
    some: list[PartialDelta] = []
    size = 0
    for delta in deltas:
        full = size + delta.nbytes > entries.MAX_BYTES or len(some) == entries.MAX_SESSIONS
        if some and full:
            yield some
            some, size = [], 0
        some.append(delta)
        size += delta.nbytes
    if some:
        yield some


def _entry(deltas: Sequence[PartialDelta]) -> Entry:
    versions = [[segment.version for segment in delta.segments] for delta in deltas]
    record = Partials(
        sessions=tuple([delta.session for delta in deltas]),
        attempts=tuple([delta.attempt for delta in deltas]),
        starts=tuple([delta.start for delta in deltas]),
        ends=tuple([delta.end for delta in deltas]),
        first_versions=tuple(map(min, versions)),
        last_versions=tuple(map(max, versions)),
        payload=NOT_PLACED,
    )
    key = f"partial_tokens/{record.key().partition('/')[2]}"
    fields, arrays = partial_columns(deltas)
    payload = prepare_record(RecordType.PARTIAL_TOKENS, key=key, fields=fields, arrays=arrays)
    return Entry(record, payload=Payload(key, payload))


def partial_columns(
    deltas: Sequence[PartialDelta],
) -> tuple[dict[str, object], dict[str, list[Array]]]:
    """Fields and arrays of a record, or of a frame, with these pieces in order."""
    fields: dict[str, object] = {
        "sessions": [(delta.session.group, delta.session.index) for delta in deltas],
        "attempts": [delta.attempt for delta in deltas],
        "starts": [delta.start for delta in deltas],
        "ends": [delta.end for delta in deltas],
        "segments": [[(s.version, s.start, s.end) for s in delta.segments] for delta in deltas],
    }
    arrays = {
        "token_ids": [delta.token_ids_N for delta in deltas],
        "logprobs": [delta.logprobs_N for delta in deltas],
        "loss_mask": [delta.loss_mask_N for delta in deltas],
    }
    return fields, arrays


class PartialTokens(NamedTuple):
    """The rows of a payload record."""

    fields: dict[str, Any]
    arrays: dict[str, Array]
    bounds: Sequence[int]
    """Where each row begins in the arrays, and where the last one ends."""

    @classmethod
    def of(cls, fields: dict[str, Any], arrays: dict[str, Array]) -> PartialTokens:
        """The rows that have these fields and arrays."""
        lengths = np.subtract(fields["ends"], fields["starts"])
        return cls(fields, arrays, [0, *np.cumsum(lengths).tolist()])

    def piece(self, row: int) -> PartialDelta:
        """The tokens of one row; the arrays are views."""
        part = slice(self.bounds[row], self.bounds[row + 1])
        group, index = self.fields["sessions"][row]
        return PartialDelta(
            session=SessionId(GroupId(group), index),
            start=self.fields["starts"][row],
            token_ids_N=self.arrays["token_ids"][part],
            logprobs_N=self.arrays["logprobs"][part],
            loss_mask_N=self.arrays["loss_mask"][part],
            segments=tuple(
                [Segment(PolicyVersion(v), s, e) for v, s, e in self.fields["segments"][row]]
            ),
            attempt=self.fields["attempts"][row],
        )


def held_tokens(payload: Payload) -> PartialTokens:
    """The rows of a record that is on its way to the log."""
    view = memoryview(payload.record).toreadonly()
    header = decode_header(view, 0)
    assert header is not None
    fields = record_body(view, 0, header)
    return PartialTokens.of(fields, record_arrays(view, 0, fields))


def read_tokens(reader: PayloadReader, batch: PartialBatch) -> PartialTokens:
    """The rows of a record of the log.

    Raises:
        DamagedError: The reference does not lead to a valid record with these rows.
    """
    ref, record = batch.payload, batch.record
    assert ref is not None
    record_type, fields, arrays = reader.read(ref)
    expected = {
        "sessions": [[session.group, session.index] for session in record.sessions],
        "attempts": list(record.attempts),
        "starts": list(record.starts),
        "ends": list(record.ends),
    }
    same = all(fields.get(name) == value for name, value in expected.items())
    if record_type is not RecordType.PARTIAL_TOKENS or not same:
        raise DamagedError(
            f"a record of type {record_type.name} is not that of {record.key()}",
            where=SegmentName(ref.incarnation, Stream.PAYLOAD, ref.segment).path,
            rule="partials refers to the tokens of its sessions, in order",
            way_out="restore the log from a copy",
        )
    return PartialTokens.of(fields, arrays)


def joined_prefix(
    session: SessionId, attempt: int, pieces: Sequence[PartialDelta]
) -> SessionPrefix:
    """The pieces of an attempt, which follow one another from token 0, as copies in one."""
    return SessionPrefix(
        session,
        attempt,
        np.concatenate([np.empty(0, IDS), *(piece.token_ids_N for piece in pieces)]),
        np.concatenate([np.empty(0, LOGPROBS), *(piece.logprobs_N for piece in pieces)]),
        np.concatenate([np.empty(0, MASK), *(piece.loss_mask_N for piece in pieces)]),
        joined_segments(segment for piece in pieces for segment in piece.segments),
    )


def says_the_same(first: PartialDelta, second: PartialDelta) -> bool:
    """Whether two pieces are of the same tokens, bit by bit."""
    return (
        first.start == second.start
        and first.token_ids_N.tobytes() == second.token_ids_N.tobytes()
        and first.logprobs_N.tobytes() == second.logprobs_N.tobytes()
        and first.loss_mask_N.tobytes() == second.loss_mask_N.tobytes()
        and joined_segments(first.segments) == joined_segments(second.segments)
    )
