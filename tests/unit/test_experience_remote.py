"""A store in another process: what it acknowledges, what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import experience_records as make
import numpy as np
import pytest
from remote_cases import (
    FLUSH_S,
    INLINE,
    Doors,
    check_log,
    doors,
    finished,
    group_of,
    new_storage,
    session,
    start_store,
    state_of,
    wait_until,
)

from perdure.core.errors import (
    FencedError,
    LifecycleError,
    StorageError,
    TrainingError,
)
from perdure.core.faults import FaultPoint
from perdure.core.ids import GroupId, SessionId
from perdure.core.trajectories import Segment, SessionPrefix
from perdure.experience import RemoteOptions
from perdure.experience.entries import MAX_BYTES
from perdure.storage.faulty import FaultyStorage, StorageFault, StorageFaultKind
from perdure.storage.memory import MemoryStorage


@pytest.fixture
def storage() -> MemoryStorage:
    return new_storage()


@pytest.fixture
def door() -> Iterator[Doors]:
    with doors() as value:
        yield value


def test_sessions_of_a_worker_are_in_the_log_when_they_are_acknowledged(
    storage: MemoryStorage, door: Doors
) -> None:
    store = start_store(storage, groups=3)
    door.open(store)
    worker = door.worker()
    sent = [*group_of(0), session(1, 1, 0.25, length=70)]
    future = worker.sessions_done(sent, settled=[finished(0)])
    position = future.result(FLUSH_S)
    check_log(storage, sent)
    assert position <= store.position
    assert (state_of(store, 0), state_of(store, 1)) == ("finished", "running")
    both = store.rewarded_group(GroupId(0))
    assert both.rewards == (0.0, 1.0)
    assert [one.session.index for one in both.trajectories] == [0, 1]
    worker.close()


def test_nothing_is_acknowledged_before_it_is_durable(storage: MemoryStorage, door: Doors) -> None:
    store = start_store(storage, groups=1, options=INLINE)
    door.open(store)
    worker = door.worker()
    future = worker.sessions_done([session(0, 0)])
    refused = worker.sessions_done([session(9, 0)])
    wait_until(lambda: state_of(store, 0) == "running")
    assert not future.done()
    assert not refused.done(), "answers keep the order of requests"
    store.flush(FLUSH_S)
    future.result(FLUSH_S)
    check_log(storage, [session(0, 0)])
    with pytest.raises(LifecycleError):
        refused.result(FLUSH_S)
    worker.close()


def test_nothing_is_told_before_it_is_durable(
    storage: MemoryStorage, door: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who went on from a token that a crash takes back would leave a gap."""
    store = start_store(storage, groups=1, options=INLINE)
    door.open(store)
    worker = door.worker()
    piece = make.delta(0, 0, 0, 3)
    store.partials([piece])
    asked, prefixes = threading.Event(), store.prefixes

    def heard(sessions: Sequence[SessionId]) -> dict[SessionId, SessionPrefix]:
        asked.set()
        return prefixes(sessions)

    monkeypatch.setattr(store, "prefixes", heard)
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(worker.prefix, piece.session)
        assert asked.wait(FLUSH_S)
        refused = worker.tool_result(make.tool_result(9, 0))
        behind = worker.tool_result(make.tool_result(0, 0))
        wait_until(lambda: bool(store.tool_results(piece.session)))
        assert not told.done()
        store.flush(FLUSH_S)
        assert told.result(FLUSH_S).response_ids_T.tolist() == piece.token_ids_N.tolist()
    behind.result(FLUSH_S)
    with pytest.raises(LifecycleError):
        refused.result(FLUSH_S)
    worker.close()


def test_a_question_is_not_waited_for_forever(storage: MemoryStorage, door: Doors) -> None:
    store = start_store(storage, groups=1, options=INLINE)
    door.open(store)
    worker = door.worker(options=RemoteOptions(stall_timeout_s=0.05))
    store.partials([make.delta(0, 0, 0, 3)])
    with pytest.raises(StorageError, match=r"a question got no answer in 0\.05 s"):
        worker.prefix(SessionId(GroupId(0), 0))
    store.flush(FLUSH_S)
    with pytest.raises(TypeError, match="not int"):
        worker.prefix(SessionId(GroupId(0), True))
    with contextlib.suppress(StorageError):
        worker.close()
    with pytest.raises(ValueError, match="closed"):
        worker.prefixes([SessionId(GroupId(0), 0)])


def test_a_group_is_read_before_and_after_its_sessions_are_durable(
    storage: MemoryStorage, door: Doors
) -> None:
    store = start_store(storage, groups=1, options=INLINE)
    door.open(store)
    worker = door.worker()
    future = worker.sessions_done(group_of(0), settled=[finished(0)])
    wait_until(lambda: state_of(store, 0) == "finished")
    early = store.rewarded_group(GroupId(0))
    store.flush(FLUSH_S)
    future.result(FLUSH_S)
    store.check()
    late = store.rewarded_group(GroupId(0))
    store.release([GroupId(0)])
    store.check()
    mapped = store.rewarded_group(GroupId(0))
    for group in (early, late, mapped):
        for index, one in enumerate(group.trajectories):
            wanted = make.trajectory(0, index)
            assert one.session == wanted.session
            np.testing.assert_array_equal(one.response_ids_T, wanted.response_ids_T, strict=True)
            assert not one.logprobs_T.flags.writeable
    worker.close()


def test_what_counted_before_is_acknowledged_again_and_counts_once(
    storage: MemoryStorage, door: Doors
) -> None:
    door.open(start_store(storage, groups=2))
    worker = door.worker()
    worker.sessions_done([session(0, 0)]).result(FLUSH_S)
    other = session(0, 0, 0.125)
    again = worker.sessions_done([other, session(0, 1), session(0, 1, 0.75)])
    again.result(FLUSH_S)
    worker.sessions_done([session(1, 0), session(1, 0, 0.75)]).result(FLUSH_S)
    worker.sessions_done([other], settled=[finished(0)]).result(FLUSH_S)
    worker.sessions_done([], settled=[finished(0)]).result(FLUSH_S)
    check_log(storage, [session(0, 0), session(0, 1), session(1, 0)])
    worker.close()


def test_more_than_one_record_holds_is_logged_in_several(
    storage: MemoryStorage, door: Doors
) -> None:
    door.open(start_store(storage, groups=2))
    worker = door.worker()
    sent = [session(g, i, length=MAX_BYTES // 20) for g in range(2) for i in range(2)]
    assert sum(one.trajectory.nbytes for one in sent) > MAX_BYTES
    worker.sessions_done(sent).result(FLUSH_S)
    check_log(storage, sent)
    worker.close()


def test_sessions_of_workers_and_of_the_own_process_share_a_record(
    storage: MemoryStorage, door: Doors
) -> None:
    store = start_store(storage, groups=3, options=INLINE)
    door.open(store)
    worker = door.worker()
    store.sessions_done([session(0, 0)])
    future = worker.sessions_done(group_of(1))
    wait_until(lambda: state_of(store, 1) == "running")
    store.sessions_done([session(0, 1), session(2, 0)])
    store.flush(FLUSH_S)
    future.result(FLUSH_S)
    check_log(storage, [session(0, 0), *group_of(1), session(0, 1), session(2, 0)])
    records = {id(s.batch.payload) for g in store.state.groups.values() for s in g.done.values()}
    assert len(records) == 1
    worker.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"reward": float("nan")}, TrainingError),
        ({"parts": {"right": "very"}}, ValueError),
        ({"logprobs_T": np.zeros(4)}, TypeError),
        ({"logprobs_T": np.zeros(1, np.float32)}, ValueError),
        ({"segments": ()}, TrainingError),
        ({"session": SessionId(GroupId(0), True)}, TypeError),
        ({"parts": {"right": None}}, TypeError),
    ],
)
def test_what_cannot_be_logged_is_refused_and_nothing_else_is(
    storage: MemoryStorage, door: Doors, change: dict[str, object], error: type[Exception]
) -> None:
    door.open(start_store(storage, groups=1))
    worker = door.worker()
    good = session(0, 0)
    fields = {name: value for name, value in change.items() if name in good._fields}
    rest = {name: value for name, value in change.items() if name not in fields}
    trajectory = dataclasses.replace(good.trajectory, **rest)
    if "segments" in change:
        empty = np.zeros(0, np.int32)
        trajectory = dataclasses.replace(
            trajectory,
            response_ids_T=empty,
            logprobs_T=empty.astype(np.float32),
            loss_mask_T=empty.astype(np.uint8),
        )
    bad = good._replace(**{"trajectory": trajectory, **fields})
    with pytest.raises(error):
        worker.sessions_done([session(0, 1), bad]).result(FLUSH_S)
    worker.sessions_done([good]).result(FLUSH_S)
    check_log(storage, [good])
    worker.close()


def test_pieces_that_do_not_fit_together_are_refused_where_they_are_given(
    door: Doors, storage: MemoryStorage
) -> None:
    door.open(start_store(storage, groups=1))
    worker = door.worker()
    piece = make.delta(0, 0, 0, 3)
    with pytest.raises(ValueError, match=r"the tokens of g0\.s0 do not fit together: its arrays"):
        worker.partials([dataclasses.replace(piece, logprobs_N=np.zeros(2, np.float32))])
    worker.partials([piece]).result(FLUSH_S)
    assert door.connections == 1
    worker.close()


def test_a_lifecycle_error_arrives_with_its_parts(storage: MemoryStorage, door: Doors) -> None:
    store = start_store(storage, groups=1)
    door.open(store)
    worker = door.worker()
    with pytest.raises(LifecycleError) as own:
        store.sessions_done([session(5, 0)])
    with pytest.raises(LifecycleError) as remote:
        worker.sessions_done([session(5, 0)]).result(FLUSH_S)
    assert remote.value.args == own.value.args
    worker.flush(FLUSH_S)
    worker.close()


def test_a_fenced_store_answers_no_question(storage: MemoryStorage, door: Doors) -> None:
    """What it would tell may have been overtaken in the log of the next incarnation."""
    store = start_store(storage, groups=1)
    opened = door.open(store)
    worker = door.worker()
    one = SessionId(GroupId(0), 0)
    assert worker.tool_results(one) == {}
    start_store(storage.open_as_new_process(), take_over=True).close("took over")
    with pytest.raises(FencedError, match="incarnation"):
        worker.tool_results(one)
    with pytest.raises(FencedError):
        worker.close()
    door.now = None
    opened.server.close()
    with pytest.raises(FencedError):
        store.close("fenced")


def test_a_fenced_store_says_so_to_its_workers(storage: MemoryStorage, door: Doors) -> None:
    store = start_store(storage, groups=1)
    opened = door.open(store)
    worker = door.worker()
    start_store(storage.open_as_new_process(), take_over=True).close("took over")
    first = worker.sessions_done([session(0, 0)])
    with pytest.raises(FencedError) as error:
        first.result(FLUSH_S)
    assert "incarnation 1" in error.value.where
    assert error.value.way_out
    with pytest.raises(FencedError):
        worker.close()
    door.now = None
    opened.server.close()
    with pytest.raises(FencedError):
        store.close("fenced")


def test_a_failing_disk_fails_what_waits_for_it(storage: MemoryStorage, door: Doors) -> None:
    plan = [StorageFault(StorageFaultKind.NO_SPACE, hit, "payload") for hit in range(1, 9)]
    store = start_store(FaultyStorage(storage, plan=plan), groups=1)
    opened = door.open(store)
    worker = door.worker()
    future = worker.sessions_done([session(0, 0)])
    with pytest.raises(StorageError) as error:
        future.result(FLUSH_S)
    with pytest.raises(StorageError) as flushed:
        worker.flush(FLUSH_S)
    assert error.value.args == flushed.value.args
    worker.flush(FLUSH_S)
    assert "cannot be written" in error.value.what
    worker.close()
    door.now = None
    opened.server.close()
    with pytest.raises(StorageError):
        store.close("full")


def test_a_worker_waits_while_too_much_is_unacknowledged(
    storage: MemoryStorage, door: Doors
) -> None:
    store = start_store(storage, groups=2, options=INLINE)
    door.open(store)
    worker = door.worker(options=RemoteOptions(max_unacknowledged_bytes=1))
    first = worker.sessions_done([session(0, 0)])
    second: list[object] = []
    waiting = threading.Thread(
        target=lambda: second.append(worker.sessions_done([session(1, 0)]).result(FLUSH_S))
    )
    waiting.start()
    wait_until(lambda: state_of(store, 0) == "running")
    waiting.join(0.05)
    assert waiting.is_alive()
    assert state_of(store, 1) == "pending"
    store.flush(FLUSH_S)
    first.result(FLUSH_S)
    wait_until(lambda: state_of(store, 1) == "running")
    store.flush(FLUSH_S)
    waiting.join(FLUSH_S)
    assert len(second) == 1
    worker.close()


class SlowDisk:
    """A fault hook that holds the log's thread in front of its sync while ``works`` is clear."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()

    def reach(self, point: FaultPoint) -> None:
        if point is FaultPoint.LOG_CONTROL_WRITTEN:
            assert self.works.wait(FLUSH_S)


def test_a_worker_does_not_wait_forever(storage: MemoryStorage, door: Doors) -> None:
    disk = SlowDisk()
    store = start_store(storage, groups=2, faults=disk)
    door.open(store)
    disk.works.clear()
    options = RemoteOptions(max_unacknowledged_bytes=1, stall_timeout_s=0.05)
    worker = door.worker(options=options)
    first = worker.sessions_done([session(0, 0)])
    with pytest.raises(StorageError, match="not acknowledged within 0.05 s"):
        worker.sessions_done([session(1, 0)])
    with pytest.raises(StorageError, match="no answer"):
        worker.flush(0.01)
    with pytest.raises(StorageError):
        worker.close()
    with pytest.raises(StorageError, match="closed before"):
        first.result(0)
    disk.works.set()
    store.flush(FLUSH_S)


def test_a_closed_worker_takes_nothing(storage: MemoryStorage, door: Doors) -> None:
    door.open(start_store(storage, groups=1))
    worker = door.worker()
    worker.close()
    worker.close()
    with pytest.raises(ValueError, match="closed"):
        worker.sessions_done([session(0, 0)])


def test_closing_the_server_answers_what_was_read(storage: MemoryStorage, door: Doors) -> None:
    store = start_store(storage, groups=1)
    opened = door.open(store)
    worker = door.worker()
    futures = [worker.sessions_done([one]) for one in group_of(0)]
    wait_until(lambda: len(store.state.groups[GroupId(0)].rewards) == 2)
    opened.server.close()
    for future in futures:
        future.result(FLUSH_S)
    worker.close()
    door.now = None
    store.close("closed")


def test_workers_append_side_by_side(storage: MemoryStorage, door: Doors) -> None:
    store = start_store(storage, groups=40)
    door.open(store)
    workers = [door.worker() for _ in range(4)]

    def work(number: int) -> None:
        for group in range(number, 40, 4):
            workers[number].sessions_done(group_of(group), settled=[finished(group)])
        workers[number].close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FLUSH_S)
    check_log(storage, [one for group in range(40) for one in group_of(group)])
    assert len(store.oldest_finished(99)) == 40


def test_segments_of_several_versions_arrive(storage: MemoryStorage, door: Doors) -> None:
    door.open(start_store(storage, groups=1))
    worker = door.worker()
    one = session(0, 0)
    segments = (Segment(make.published(3).version, 0, 1), Segment(make.published(2).version, 1, 4))
    trajectory = dataclasses.replace(
        one.trajectory, segments=segments, loss_mask_T=np.array([1, 0, 0, 1], np.uint8)
    )
    mixed = one._replace(trajectory=trajectory)
    worker.sessions_done([session(0, 1), mixed]).result(FLUSH_S)
    check_log(storage, [session(0, 1), mixed])
    worker.close()
