"""Group commit: order, batching, retries in new segments, final failures, closing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from log_cases import (
    FLUSH_S,
    History,
    check_contents,
    controls,
    kept_keys,
    keys_of,
    make_claim,
    make_run,
    open_writer,
    payload_of,
    read_head,
    session_done,
    sessions_done,
    started,
    submitted,
)

from perdure.core.clock import ManualClock, SystemClock
from perdure.core.errors import FencedError, StorageError
from perdure.core.experience_records import GroupSettled, SessionsDone
from perdure.core.faults import (
    FaultAction,
    FaultPlan,
    FaultPoint,
    FaultRule,
    InjectedFault,
    NoFaults,
)
from perdure.core.ids import GroupId, LogPosition
from perdure.core.record_types import GroupOutcome
from perdure.core.records import Closed
from perdure.core.storage_api import Storage
from perdure.experience.claims import Claim
from perdure.experience.entries import Entry
from perdure.experience.writer import LogOptions, LogWriter
from perdure.storage import (
    FaultyStorage,
    MemoryStorage,
    PosixStorage,
    StorageFault,
    StorageFaultKind,
)

ORDER = [
    FaultPoint.LOG_PAYLOAD_WRITTEN,
    FaultPoint.LOG_PAYLOAD_FSYNCED,
    FaultPoint.LOG_CONTROL_WRITTEN,
    FaultPoint.LOG_FSYNCED,
    FaultPoint.LOG_ACKNOWLEDGED,
]


def _claimed(storage: Storage) -> Claim:
    make_run(storage)
    return make_claim(storage)


def _start(storage: Storage, **options: int) -> tuple[LogWriter, History]:
    claimed = _claimed(storage)
    writer = open_writer(storage, claimed, **options)
    history = History()
    history.append(writer, [started(claimed)])
    writer.flush(FLUSH_S)
    return writer, history


def _faulty(*plan: StorageFault) -> tuple[MemoryStorage, FaultyStorage]:
    memory = MemoryStorage()
    return memory, FaultyStorage(memory, plan=plan)


def test_log_commit_order_on_the_disk_and_at_the_fault_points() -> None:
    storage = MemoryStorage()
    claimed = _claimed(storage)
    plan = FaultPlan()
    points: list[FaultPoint] = []
    plan.observers.append(points.append)
    writer = open_writer(storage, claimed, faults=plan)
    writer.append([started(claimed), session_done(0)])
    writer.flush(FLUSH_S)
    assert points.count(FaultPoint.LOG_SEGMENT_OPENED) == 2
    points.clear()
    steps = storage.operations

    future = writer.append([session_done(1)])
    plan.observers.append(lambda point: states.append((point, future.done())))
    states: list[tuple[FaultPoint, bool]] = []
    writer.flush(FLUSH_S)

    assert points == ORDER
    assert [done for _, done in states] == [False, False, False, False, True]
    done = [(operation.kind, operation.path) for operation in storage.journal[steps:]]
    payload, control = "log/payload-000001-000000.plog", "log/control-000001-000000.plog"
    assert done == [("write", payload), ("sync", payload), ("write", control), ("sync", control)]


def test_log_one_commit_takes_everything_that_waits() -> None:
    storage = MemoryStorage()
    writer, _ = _start(storage)
    futures = [writer.append([submitted(group)]) for group in range(50)]
    steps = storage.operations
    writer.flush(FLUSH_S)
    assert storage.operations == steps + 2
    assert {future.result() for future in futures} == {writer.position}


def test_log_entries_learn_where_they_lie() -> None:
    storage = MemoryStorage()
    writer, _ = _start(storage)
    entries = [submitted(0), session_done(0), submitted(1), session_done(1), sessions_done([2, 3])]
    future = writer.append(entries)
    assert [entry.position for entry in entries] == [None] * 5
    writer.flush(FLUSH_S)
    placed = {
        key: position for position, record in read_head(storage).records for key in keys_of(record)
    }
    assert [entry.position for entry in entries] == [
        placed[keys_of(entry.control)[0]] for entry in entries
    ]
    assert entries[-1].position == future.result() == writer.position
    records = [r for r in controls(read_head(storage)) if isinstance(r, SessionsDone)]
    refs = [record.payload for record in records]
    assert [entry.ref for entry in entries] == [None, refs[0], None, refs[1], refs[1]]
    assert [entry.first_row for entry in entries] == [0, 0, 0, 0, 1]


def _settled(group: int) -> Entry:
    return Entry(GroupSettled(GroupId(group), GroupOutcome.FINISHED))


def test_log_neighbouring_sessions_share_a_record_and_what_settles_follows() -> None:
    storage = MemoryStorage()
    writer, history = _start(storage)
    history.append(writer, [session_done(0), _settled(0)])
    history.append(writer, [session_done(1)])
    history.append(writer, [_settled(1), sessions_done([2, 3]), submitted(9), session_done(4)])
    writer.flush(FLUSH_S)
    log = read_head(storage)
    check_contents(storage, log)
    found = [
        [session.group for session in record.sessions]
        if isinstance(record, SessionsDone)
        else record.key()
        for record in controls(log)[1:]
    ]
    assert found == [[0, 1, 2, 3], "group_settled/0", "group_settled/1", "submitted/9", [4]]
    assert sorted(history.acknowledged) == sorted(kept_keys(log))


@pytest.mark.parametrize(("limit", "most"), [("MAX_SESSIONS", 3), ("MAX_BYTES", 3 * 57)])
def test_log_records_of_sessions_are_limited(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(f"perdure.experience.entries.{limit}", most)
    storage = MemoryStorage()
    writer, history = _start(storage)
    for groups in ([0], [1, 2], [3], [4], [5, 6], [7]):
        history.append(writer, [sessions_done(groups)])
    writer.flush(FLUSH_S)
    log = read_head(storage)
    check_contents(storage, log)
    rows = [len(record.sessions) for record in controls(log) if isinstance(record, SessionsDone)]
    assert rows == [3, 2, 3]


def test_log_sessions_that_counted_in_part_count_once(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    writer, _ = _start(storage)
    for groups in ([0, 1], [0, 2], [1, 2], [0, 1]):
        writer.append([sessions_done(groups)])
        writer.flush(FLUSH_S)
    log = read_head(storage)
    rows = [[s.group for s in r.sessions] for r in controls(log) if isinstance(r, SessionsDone)]
    assert rows == [[0, 1], [0, 2]]
    assert log.report.duplicates == 2


def test_log_payload_alone_is_acknowledged_without_a_control_record() -> None:
    storage = MemoryStorage()
    writer, _ = _start(storage)
    before = writer.position
    entry = Entry(None, payload_of(0))
    future = writer.append([entry])
    writer.flush(FLUSH_S)
    assert future.result() == before
    assert entry.ref is not None
    assert entry.position is None


def test_log_key_that_is_pending_is_not_queued_again() -> None:
    storage = MemoryStorage()
    writer, _ = _start(storage)
    first = writer.append([submitted(0)])
    again = writer.append([submitted(0)])
    both = writer.append([submitted(0), submitted(1)])
    assert not again.done()
    writer.flush(FLUSH_S)
    assert [future.done() for future in (first, again, both)] == [True] * 3
    assert read_head(storage).report.duplicates == 0
    # No longer pending: it is written again, and the reader lets the first one count.
    writer.append([submitted(0)])
    writer.flush(FLUSH_S)
    log = read_head(storage)
    assert log.report.duplicates == 1
    assert kept_keys(log) == ["incarnation/1", "submitted/0", "submitted/1"]


def test_log_writer_whose_run_was_moved_away_acknowledges_nothing(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "run")
    writer, history = _start(storage)
    acknowledged = list(history.acknowledged)
    (tmp_path / "run").rename(tmp_path / "moved")
    history.append(writer, [submitted(0)])
    with pytest.raises(FencedError, match="no longer where it was"):
        writer.flush(FLUSH_S)
    assert history.acknowledged == acknowledged


def test_log_cancelling_a_future_cancels_nothing() -> None:
    writer, _ = _start(MemoryStorage())
    future = writer.append([submitted(0)])
    assert not future.cancel()
    writer.flush(FLUSH_S)
    assert future.result() == writer.position


def test_log_segments_are_closed_between_batches_and_chained() -> None:
    storage = MemoryStorage()
    writer, history = _start(storage, segment_bytes=300)
    for group in range(6):
        history.append(writer, [session_done(group), submitted(group)])
        writer.flush(FLUSH_S)
    assert len([name for name in storage.list("log") if name.startswith("control")]) >= 3
    log = read_head(storage.crash())
    assert kept_keys(log) == history.asked
    assert log.report.tails == ()
    check_contents(storage, log)


def test_log_record_that_cannot_be_encoded_is_refused_and_nothing_is_queued() -> None:
    storage = MemoryStorage()
    writer, history = _start(storage)
    bad = submitted(1)
    object.__setattr__(bad.control, "answer", object())
    with pytest.raises(TypeError):
        writer.append([submitted(0), bad])
    with pytest.raises(ValueError, match="both"):
        writer.append([Entry(None)])
    with pytest.raises(ValueError, match="refers to no payload"):
        writer.append([Entry(submitted(0).control, payload_of(0))])
    history.append(writer, [submitted(2)])
    writer.flush(FLUSH_S)
    assert kept_keys(read_head(storage)) == history.asked == history.acknowledged


# One failure in every place where a commit can fail: the batch goes to a new segment.
_FAILURES = [
    StorageFault(kind, hit=1, path_contains=f"{stream}-000001-000000")
    for stream in ("control", "payload")
    for kind in (
        StorageFaultKind.TORN_WRITE,
        StorageFaultKind.EIO_WRITE,
        StorageFaultKind.EIO_SYNC,
        StorageFaultKind.NO_SPACE,
    )
]


@pytest.mark.parametrize("fault", _FAILURES, ids=lambda f: f"{f.kind.value}-{f.path_contains[:7]}")
@pytest.mark.parametrize("hit", [1, 2, 3])
def test_log_failed_write_goes_to_a_new_segment(fault: StorageFault, hit: int) -> None:
    memory, storage = _faulty(StorageFault(fault.kind, hit, fault.path_contains))
    claimed = _claimed(storage)
    writer = open_writer(storage, claimed)
    history = History()
    history.append(writer, [started(claimed), session_done(0)])
    writer.flush(FLUSH_S)
    for group in (1, 2):
        history.append(writer, [session_done(group), submitted(group)])
        writer.flush(FLUSH_S)

    assert storage.fired[fault.kind] == 1
    assert history.acknowledged == history.asked
    for found in (memory, memory.process_kill(), memory.crash()):
        log = read_head(found)
        assert kept_keys(log) == history.asked
        check_contents(found, log)
    writer.close("done")
    assert kept_keys(read_head(memory.crash())) == history.asked


@pytest.mark.parametrize("stream", ["control", "payload"])
def test_log_several_segments_in_a_row_may_fail(stream: str) -> None:
    plan = [
        StorageFault(StorageFaultKind.TORN_WRITE, hit, f"{stream}-000001-00000{segment}")
        for segment, hit in ((0, 3), (1, 2))
    ]
    memory, storage = _faulty(*plan)
    writer, history = _start(storage)
    for group in range(4):
        history.append(writer, [session_done(group)])
        writer.flush(FLUSH_S)
    assert storage.fired[StorageFaultKind.TORN_WRITE] >= 1
    log = read_head(memory.crash())
    assert kept_keys(log) == history.acknowledged == history.asked
    check_contents(memory, log)


def _full_disk() -> tuple[MemoryStorage, FaultyStorage]:
    plan = [StorageFault(StorageFaultKind.NO_SPACE, hit, "log/") for hit in range(5, 200)]
    return _faulty(*plan)


def test_log_full_disk_is_one_clear_sentence_and_final() -> None:
    memory, storage = _full_disk()
    writer, history = _start(storage)
    for group in range(10):
        history.append(writer, [submitted(group)])
        try:
            writer.flush(FLUSH_S)
        except StorageError:
            break
    waiting = history.asked[len(history.acknowledged) :]
    assert history.acknowledged
    assert waiting

    with pytest.raises(StorageError, match="the experience log cannot be written") as raised:
        writer.append([submitted(99)])
    text = str(raised.value)
    assert "3 tries failed; way out: free space" in text
    assert "nothing acknowledged is lost" in text
    assert "\n" not in text
    for call in (lambda: writer.flush(FLUSH_S), lambda: writer.close("x")):
        with pytest.raises(StorageError, match="cannot be written"):
            call()
    writer.close("closed already")
    for found in (memory.process_kill(), memory.crash()):
        assert kept_keys(read_head(found)) == history.acknowledged
        claimed = make_claim(found)
        later = open_writer(found, claimed)
        later.append([started(claimed), submitted(99)])
        later.flush(FLUSH_S)
        kept = kept_keys(read_head(found))
        assert kept == [*history.acknowledged, "incarnation/2", "submitted/99"]


def test_log_bytes_of_a_failed_sync_are_never_counted_by_the_next_claimant() -> None:
    # The page cache shows them, the disk will never have them.
    plan = [StorageFault(StorageFaultKind.EIO_SYNC, hit, "control") for hit in range(3, 100)]
    memory, storage = _faulty(*plan)
    writer, history = _start(storage)
    history.append(writer, [submitted(0)])
    with pytest.raises(StorageError):
        writer.flush(FLUSH_S)
    resumed = memory.process_kill()
    claimed = make_claim(resumed)
    later = open_writer(resumed, claimed)
    later.append([started(claimed), submitted(1)])
    later.flush(FLUSH_S)
    expected = [*history.acknowledged, "incarnation/2", "submitted/1"]
    assert kept_keys(read_head(resumed)) == expected
    assert kept_keys(read_head(resumed.crash())) == expected


def test_log_fenced_writer_acknowledges_nothing_more() -> None:
    storage = MemoryStorage()
    writer, history = _start(storage)
    future = history.append(writer, [submitted(0)])
    newer = make_claim(storage.open_as_new_process(), take_over=True)
    assert newer.took_over
    with pytest.raises(FencedError, match="incarnation 1: this writer has been fenced"):
        writer.flush(FLUSH_S)
    assert isinstance(future.exception(), FencedError)
    with pytest.raises(FencedError):
        writer.append([submitted(1)])
    with pytest.raises(FencedError):
        writer.close("x")
    assert history.acknowledged == ["incarnation/1"]
    assert kept_keys(read_head(storage)) == ["incarnation/1"]


@pytest.mark.parametrize("point", [*ORDER, FaultPoint.LOG_SEGMENT_OPENED])
def test_log_exception_at_a_fault_point_reaches_the_owner(point: FaultPoint) -> None:
    storage = MemoryStorage()
    claimed = _claimed(storage)
    hit = 1 if point is FaultPoint.LOG_SEGMENT_OPENED else 2
    plan = FaultPlan([FaultRule(point, hit, FaultAction.RAISE)])
    writer = open_writer(storage, claimed, faults=plan)
    history = History()

    def write_three_batches() -> None:
        for group in range(3):
            entries = [session_done(group)]
            history.append(writer, entries if group else [started(claimed), *entries])
            writer.flush(FLUSH_S)

    with pytest.raises(InjectedFault):
        write_three_batches()
    assert len(plan.fired) == 1
    with pytest.raises(InjectedFault):
        writer.append([submitted(5)])
    kept = kept_keys(read_head(storage.process_kill()))
    assert kept == history.asked[: len(kept)]
    assert len(kept) >= len(history.acknowledged)


def test_log_closing_seals_the_log_and_is_final() -> None:
    storage = MemoryStorage()
    writer, history = _start(storage)
    history.append(writer, [session_done(0)])
    writer.close("finished")
    writer.close("again")
    with pytest.raises(ValueError, match="closed"):
        writer.append([submitted(1)])
    log = read_head(storage.crash())
    assert controls(log)[-1] == Closed(writer.position.incarnation, "finished")
    assert storage.exists("seals/1.json")
    assert kept_keys(log) == history.asked


def test_log_writer_that_never_started_leaves_no_trace() -> None:
    storage = MemoryStorage()
    claimed = _claimed(storage)
    writer = open_writer(storage, claimed)
    writer.close("nothing to do")
    assert storage.list("log") == []
    claimed.release()
    assert make_claim(storage).parent == 0


def test_log_first_record_must_start_the_incarnation() -> None:
    storage = MemoryStorage()
    writer = open_writer(storage, _claimed(storage))
    with pytest.raises(AssertionError, match="starts first"):
        writer.append([submitted(0)])


class _Held:
    """A fault hook that holds the commit thread at a point until it is let go."""

    def __init__(self, point: FaultPoint) -> None:
        self._point = point
        self.reached = threading.Event()
        self.go = threading.Event()

    def reach(self, point: FaultPoint) -> None:
        if point is self._point:
            self.reached.set()
            assert self.go.wait(FLUSH_S)


def _threaded(storage: Storage, claimed: Claim, **options: float) -> LogWriter:
    return LogWriter(
        storage,
        claim=claimed,
        clock=SystemClock(),
        faults=NoFaults(),
        options=LogOptions(**options),
    )


def test_log_thread_commits_without_being_asked() -> None:
    storage = MemoryStorage()
    claimed = _claimed(storage)
    before = set(threading.enumerate())
    writer = _threaded(storage, claimed, linger_s=0.001)
    future = writer.append([started(claimed), session_done(0)])
    position = future.result(FLUSH_S)
    assert position == writer.position == LogPosition(claimed.incarnation, 0, position.offset)
    writer.close("done")
    assert set(threading.enumerate()) <= before
    check_contents(storage, read_head(storage.crash()))


def test_log_urge_ends_the_linger() -> None:
    storage = MemoryStorage()
    claimed = _claimed(storage)
    writer = _threaded(storage, claimed, linger_s=3600.0)
    future = writer.append([started(claimed)])
    writer.urge()
    future.result(FLUSH_S)
    writer.append([submitted(0)])
    writer.flush(FLUSH_S)
    assert kept_keys(read_head(storage)) == ["incarnation/1", "submitted/0"]
    writer.close("done")


def test_log_append_does_not_wait_for_the_disk_but_for_room() -> None:
    storage = MemoryStorage()
    claimed = _claimed(storage)
    held = _Held(FaultPoint.LOG_CONTROL_WRITTEN)
    writer = LogWriter(
        storage,
        claim=claimed,
        clock=ManualClock(),
        faults=held,
        options=LogOptions(max_pending_bytes=4096, stall_timeout_s=0.05),
    )
    first = writer.append([started(claimed)])
    assert held.reached.wait(FLUSH_S)
    writer.append([submitted(0)])
    assert not first.done()

    def append(groups: range) -> None:
        for group in groups:
            writer.append([submitted(group)])

    with pytest.raises(StorageError, match="did not become durable within"):
        append(range(1, 100))
    with pytest.raises(StorageError, match="did not become durable within"):
        writer.flush(0.01)
    held.go.set()
    writer.flush(FLUSH_S)
    append(range(100, 200))
    writer.flush(FLUSH_S)
    writer.close("done")
    log = read_head(storage)
    assert kept_keys(log)[-100:] == [f"submitted/{group}" for group in range(100, 200)]


def test_log_failure_in_the_thread_reaches_futures_and_later_calls() -> None:
    memory, storage = _full_disk()
    claimed = _claimed(storage)
    before = set(threading.enumerate())
    writer = _threaded(storage, claimed, linger_s=0.0)
    writer.append([started(claimed)]).result(FLUSH_S)

    def append_and_wait() -> None:
        for group in range(20):
            writer.append([submitted(group)]).result(FLUSH_S)

    with pytest.raises(StorageError, match="cannot be written"):
        append_and_wait()
    with pytest.raises(StorageError, match="cannot be written"):
        writer.close("x")
    assert set(threading.enumerate()) <= before
    assert kept_keys(read_head(memory))[0] == "incarnation/1"


def test_log_appends_from_many_threads_are_all_kept_in_each_threads_order() -> None:
    storage = MemoryStorage()
    claimed = _claimed(storage)
    writer = _threaded(storage, claimed, linger_s=0.0, segment_bytes=4096)
    writer.append([started(claimed)]).result(FLUSH_S)

    def append_many(base: int) -> None:
        for group in range(base, base + 40):
            writer.append([session_done(group), submitted(group)])

    threads = [threading.Thread(target=append_many, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close("done")
    log = read_head(storage.crash())
    kept = [key for key in kept_keys(log) if key.startswith("submitted/")]
    assert len(kept) == 160
    for base in range(0, 4000, 1000):
        mine = [key for key in kept if base <= int(key.split("/")[1]) < base + 1000]
        assert mine == [f"submitted/{group}" for group in range(base, base + 40)]
    check_contents(storage, log)


def test_log_writer_left_open_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    script = f"""
import pathlib
from log_cases import make_claim, make_run, started
from perdure.core.clock import SystemClock
from perdure.core.faults import NoFaults
from perdure.experience.writer import LogWriter
from perdure.storage import PosixStorage
storage = PosixStorage(pathlib.Path({str(tmp_path)!r}))
make_run(storage)
claimed = make_claim(storage)
writer = LogWriter(storage, claim=claimed, clock=SystemClock(), faults=NoFaults())
writer.append([started(claimed)])
raise SystemExit(3)
"""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        timeout=60,
        check=False,
    )
    assert run.returncode == 3
    assert kept_keys(read_head(PosixStorage(tmp_path))) == ["incarnation/1"]
