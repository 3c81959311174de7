"""Small logs for tests of the log: a run, a claimed inline writer, records told apart by group."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from perdure.core.clock import ManualClock
from perdure.core.events import EventSink, ignore_events
from perdure.core.experience_records import (
    Partials,
    SessionsDone,
    Submitted,
)
from perdure.core.faults import FaultHook, NoFaults
from perdure.core.ids import (
    GlobalStep,
    GroupId,
    IncarnationNumber,
    LogPosition,
    PayloadRef,
    PolicyVersion,
    SessionId,
)
from perdure.core.record_types import StopReason
from perdure.core.records import (
    Closed,
    ControlRecord,
    IncarnationStarted,
)
from perdure.core.storage_api import Storage
from perdure.core.trajectories import PartialDelta, Segment, Trajectory
from perdure.experience.claims import (
    Claim,
    Holder,
    RunInfo,
    claim,
    create_run,
    highest_incarnation,
    newest_started,
)
from perdure.experience.columns import LooseTrajectories, checked_columns
from perdure.experience.entries import Entry
from perdure.experience.partials import partial_entries, read_tokens, says_the_same
from perdure.experience.payloads import Payload, PayloadReader, columns_payload
from perdure.experience.reader import LineageLog, read_lineage
from perdure.experience.record_memory import MemoryBlocks, RecordMemory
from perdure.experience.unfinished import PartialBatch
from perdure.experience.writer import LogOptions, LogWriter

RUN_ID = "0123456789abcdef0123456789abcdef"
HOLDER = Holder("host", 1)
NO_REF = PayloadRef(IncarnationNumber(0), 0, 0, 0, 0)
FLUSH_S = 60.0


def make_run(storage: Storage) -> RunInfo:
    return create_run(storage, RunInfo(RUN_ID, 1.0, {"perdure": "test"}, "config", "data"))


def make_claim(
    storage: Storage, *, faults: FaultHook | None = None, take_over: bool = False
) -> Claim:
    return claim(
        storage,
        run_id=RUN_ID,
        clock=ManualClock(),
        faults=faults or NoFaults(),
        take_over=take_over,
        info=HOLDER,
    )


def open_writer(
    storage: Storage,
    claimed: Claim,
    *,
    faults: FaultHook | None = None,
    events: EventSink = ignore_events,
    segment_bytes: int = 2**20,
    tries: int = 3,
) -> LogWriter:
    return LogWriter(
        storage,
        claim=claimed,
        clock=ManualClock(),
        faults=faults or NoFaults(),
        options=LogOptions(threaded=False, segment_bytes=segment_bytes, tries=tries),
        events=events,
    )


def started(claimed: Claim, base_position: LogPosition | None = None) -> Entry:
    record = IncarnationStarted(claimed.incarnation, claimed.parent, base_position=base_position)
    return Entry(record)


def submitted(group: int) -> Entry:
    record = Submitted(
        GroupId(group),
        GlobalStep(1),
        sessions=1,
        prompt_ids=(group, 2, 3),
        task="digits",
        answer=str(group),
        dataset_digest="d",
        data_index=group,
    )
    return Entry(record)


def trajectory(group: int, tokens: int = 5) -> Trajectory:
    return Trajectory(
        session=SessionId(GroupId(group), 0),
        prompt_ids_P=np.arange(group, group + 3, dtype=np.int32),
        response_ids_T=np.arange(tokens, dtype=np.int32) + group,
        logprobs_T=-np.arange(tokens, dtype=np.float32) / 8 - group,
        loss_mask_T=np.ones(tokens, np.uint8),
        segments=(Segment(PolicyVersion(1), 0, tokens),) if tokens else (),
        stop_reason=StopReason.STOP,
    )


def session_done(group: int, tokens: int = 5) -> Entry:
    return sessions_done([group], tokens)


def sessions_done(groups: Sequence[int], tokens: int = 5) -> Entry:
    """The first session of each of these groups, in one entry."""
    rows = len(groups)
    record = SessionsDone(
        sessions=tuple(SessionId(GroupId(group), 0) for group in groups),
        rewards=(0.5,) * rows,
        stop_reasons=(StopReason.STOP,) * rows,
        tokens=(tokens,) * rows,
        first_versions=(PolicyVersion(1),) * rows,
        last_versions=(PolicyVersion(1),) * rows,
        parts=({},) * rows,
        payload=NO_REF,
    )
    rows = [trajectory(group, tokens) for group in groups]
    return Entry(record, trajectories=LooseTrajectories(rows, checked_columns(rows)[0]))


def delta(group: int, start: int, end: int) -> PartialDelta:
    """A piece of what :func:`trajectory` gives for that group."""
    whole = trajectory(group, end)
    return PartialDelta(
        whole.session,
        start,
        whole.response_ids_T[start:],
        whole.logprobs_T[start:],
        whole.loss_mask_T[start:],
        (Segment(PolicyVersion(1), start, end),),
    )


def partials(groups: Sequence[int], start: int, end: int) -> Entry:
    """A piece of the first session of each of these groups, in one entry."""
    (entry,) = partial_entries([delta(group, start, end) for group in groups])
    return entry


def payload_of(group: int) -> Payload:
    """The payload of that group's session, encoded."""
    return payload_with([trajectory(group)])


def payload_with(trajectories: Sequence[Trajectory]) -> Payload:
    """The payload record of these trajectories."""
    return columns_payload(checked_columns(trajectories)[0], RecordMemory(MemoryBlocks()))


def keys_of(record: ControlRecord | None) -> list[str]:
    """Idempotency keys of a record: of one with rows, one for each."""
    assert record is not None
    if isinstance(record, SessionsDone):
        return [f"session_done/{session.key()}" for session in record.sessions]
    if isinstance(record, Partials):
        return record.row_keys()
    return [record.key()]


@dataclass
class History:
    """What writers were asked to append, and what they acknowledged, in order."""

    asked: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)

    def append(self, writer: LogWriter, entries: Sequence[Entry]) -> Future[LogPosition]:
        keys = [key for entry in entries for key in keys_of(entry.control)]
        self.asked += keys
        future = writer.append(entries)
        future.add_done_callback(lambda done: self._done(done, keys))
        return future

    def _done(self, future: Future[LogPosition], keys: list[str]) -> None:
        if future.exception() is None:
            self.acknowledged += keys


def read_head(storage: Storage) -> LineageLog:
    """The lineage of the newest incarnation that started, without claiming."""
    return read_lineage(
        storage, newest_started(storage, run_id=RUN_ID, below=highest_incarnation(storage) + 1)
    )


def kept_keys(log: LineageLog) -> list[str]:
    """Keys of what was asked for: without the records that the writer adds."""
    kept = [record for _, record in log.records if not isinstance(record, Closed)]
    return [key for record in kept for key in keys_of(record)]


def check_contents(storage: Storage, log: LineageLog) -> None:
    """Every record and every array is exactly what was appended."""
    reader = PayloadReader(storage)
    for _, record in log.records:
        if isinstance(record, SessionsDone):
            for row, session in enumerate(record.sessions):
                found = reader.trajectory(record.payload, row=row, session=session)
                check_same(found, trajectory(session.group, record.tokens[row]))
        elif isinstance(record, Partials):
            tokens = read_tokens(reader, PartialBatch(record, record.payload))
            for row, session in enumerate(record.sessions):
                found, start, end = tokens.piece(row), record.starts[row], record.ends[row]
                assert says_the_same(found, delta(session.group, start, end))
        elif isinstance(record, Submitted):
            assert record == submitted(record.group).control


def check_same(found: Trajectory, expected: Trajectory) -> None:
    assert found.session == expected.session
    assert found.segments == expected.segments
    assert found.stop_reason is expected.stop_reason
    np.testing.assert_array_equal(found.prompt_ids_P, expected.prompt_ids_P)
    np.testing.assert_array_equal(found.response_ids_T, expected.response_ids_T)
    np.testing.assert_array_equal(found.logprobs_T, expected.logprobs_T)
    np.testing.assert_array_equal(found.loss_mask_T, expected.loss_mask_T)


def controls(log: LineageLog) -> list[ControlRecord]:
    return [record for _, record in log.records]
