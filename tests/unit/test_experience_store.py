"""The store over an in-memory disk: appends, reading back, failing, starting again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import experience_records as make
import numpy as np
import pytest

from perdure.core.clock import ManualClock
from perdure.core.errors import (
    DamagedError,
    FencedError,
    LifecycleError,
    NothingToResumeError,
    RunBusyError,
    StorageError,
    TrainingError,
)
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, SessionId
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.core.records import Collect, Taken
from perdure.core.storage_api import Storage
from perdure.experience import (
    ClaimedRun,
    ExperienceStore,
    GroupState,
    LogOptions,
    RunInfo,
    claim_experience,
    create_run,
    read_experience,
)
from perdure.storage.faulty import FaultyStorage, StorageFault, StorageFaultKind
from perdure.storage.memory import MemoryStorage

INLINE = LogOptions(threaded=False, tries=1)
RUN_ID = "5" * 32
Claimer = Callable[..., ClaimedRun]


@pytest.fixture
def storage() -> MemoryStorage:
    value = MemoryStorage()
    create_run(value, RunInfo(RUN_ID, 0.0))
    return value


@pytest.fixture
def claim() -> Iterator[Claimer]:
    """Claims a run; whatever was started is checked after the test."""
    started: list[ExperienceStore] = []

    class Watched(ClaimedRun):
        def start(self, **arguments: Any) -> ExperienceStore:
            store = super().start(**arguments)
            started.append(store)
            return store

    def claim_it(storage: Storage, **arguments: Any) -> ClaimedRun:
        arguments = {"options": INLINE} | arguments
        claimed = claim_experience(storage, clock=ManualClock(), faults=NoFaults(), **arguments)
        claimed.__class__ = Watched
        return claimed

    yield claim_it
    for store in started:
        store.check()


@pytest.fixture
def store(storage: MemoryStorage, claim: Claimer) -> ExperienceStore:
    return claim(storage).start()


def finish(store: ExperienceStore, group: int, *, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
    """Submit a group and run it to its end."""
    store.submit([make.submitted(group, sessions=len(rewards))])
    for index, reward in enumerate(rewards):
        store.start_sessions([SessionId(GroupId(group), index)])
        store.session_done(make.trajectory(group, index), reward=reward, parts={"right": reward})
    store.settle(GroupId(group), GroupOutcome.FINISHED)


def take(store: ExperienceStore, step: int, count: int, *, local: int = 0) -> Taken:
    groups = store.oldest_finished(count)
    store.take(make.update_id(step, local), groups=groups, config_digest="config")
    return store.state.taken[make.update_id(step, local)]


def test_an_append_counts_at_once_and_is_acknowledged_with_its_place(
    store: ExperienceStore,
) -> None:
    start = store.position
    future = store.submit([make.submitted(0)])
    assert store.state.table.state_of(GroupId(0)) is GroupState.PENDING
    assert not future.done()
    assert store.position == start
    store.flush(1)
    assert future.result(0) == store.position > start


def test_a_repeated_append_changes_nothing(store: ExperienceStore) -> None:
    finish(store, 0)
    pending = store.session_done(make.trajectory(0, 1), reward=0.5)
    assert not pending.done()
    store.flush(1)
    end = store.position
    again = store.session_done(make.trajectory(0, 1, length=9), reward=0.5)
    assert again.result(0) == end
    store.flush(1)
    assert store.position == end
    assert store.rewarded_group(GroupId(0)).rewards == (0.0, 1.0)
    assert len(store.rewarded_group(GroupId(0)).trajectories[1].response_ids_T) == 4


def test_a_whole_step_may_be_repeated(storage: MemoryStorage, claim: Claimer) -> None:
    store = claim(storage).start()

    def one_step() -> None:
        finish_if_open = store.state.table.next_group == 0
        if finish_if_open:
            finish(store, 0)
        store.take(make.update_id(1), groups=[GroupId(0)], config_digest="config")
        store.append(make.step_done(1))
        store.append(make.published(1, 1))

    one_step()
    store.close("end")
    store = claim(storage).start()
    before = store.position
    one_step()
    store.flush(1)
    assert store.position == before
    assert store.take(make.update_id(1), groups=[GroupId(0)], config_digest="x").result(0) == before
    with pytest.raises(LifecycleError, match="says something else"):
        store.append(make.step_done(1, "other"))


@pytest.mark.parametrize("cache_bytes", [0, 100, 2**20])
def test_trajectories_come_back_the_same_from_memory_and_from_the_log(
    storage: MemoryStorage, claim: Claimer, cache_bytes: int
) -> None:
    store = claim(storage).start(cache_bytes=cache_bytes)
    finish(store, 0)
    fresh = store.rewarded_group(GroupId(0))
    store.flush(1)
    acknowledged = store.rewarded_group(GroupId(0))
    store.release([GroupId(0)])
    mapped = store.rewarded_group(GroupId(0))
    assert fresh.group == acknowledged.group == mapped.group == 0
    assert fresh.rewards == acknowledged.rewards == mapped.rewards == (0.0, 1.0)
    for group in (fresh, acknowledged, mapped):
        for index, found in enumerate(group.trajectories):
            wanted = make.trajectory(0, index)
            assert (found.session, found.segments) == (wanted.session, wanted.segments)
            for name in ("prompt_ids_P", "response_ids_T", "logprobs_T", "loss_mask_T"):
                value, expected = getattr(found, name), getattr(wanted, name)
                np.testing.assert_array_equal(value, expected, strict=True)
    for found in mapped.trajectories:
        assert not found.response_ids_T.flags.writeable
        assert not found.response_ids_T.flags.owndata


def test_release_keeps_what_is_not_durable(store: ExperienceStore) -> None:
    finish(store, 0)
    store.release([GroupId(0), GroupId(9)])
    assert len(store.rewarded_group(GroupId(0)).trajectories) == 2


def test_only_finished_groups_can_be_read(store: ExperienceStore) -> None:
    store.submit([make.submitted(0), make.submitted(1)])
    store.settle(GroupId(1), GroupOutcome.FAILED, "broke")
    for group, why in ((0, "pending"), (1, "failed"), (2, "never submitted")):
        with pytest.raises(LifecycleError, match=why):
            store.rewarded_group(GroupId(group))


def test_sampling_takes_the_oldest_finished_groups_each_once(store: ExperienceStore) -> None:
    for group in range(3):
        finish(store, group)
    assert store.oldest_finished(2) == [0, 1]
    assert store.oldest_finished(9) == [0, 1, 2]
    with pytest.raises(LifecycleError, match="oldest finished are"):
        store.take(make.update_id(1), groups=[GroupId(1)], config_digest="c")
    assert take(store, 1, 2).groups == (0, 1)
    assert store.oldest_finished(9) == [2]
    with pytest.raises(LifecycleError):
        store.take(make.update_id(1, 1), groups=[GroupId(0)], config_digest="c")


def test_a_restart_finds_what_the_log_says(storage: MemoryStorage, claim: Claimer) -> None:
    first = claim(storage).start(config_digest="config")
    for group in range(4):
        finish(first, group)
    first.submit([make.submitted(4), make.submitted(5)])
    first.session_done(make.trajectory(4, 1), reward=1.0)
    first.start_sessions([SessionId(GroupId(5), 0)])
    take(first, 1, 2)
    first.append(make.step_done(1))
    first.commit(make.checkpointed(1, first.position))
    take(first, 2, 1)
    first.close("stopped")

    claimed = claim(storage)
    assert (claimed.incarnation, claimed.parent) == (2, 1)
    assert claimed.run.run_id == RUN_ID
    second = claimed.start(base_checkpoint="step-00000001-1")
    assert second.parent == 1
    found, expected = (make.comparable(s.state, places=False) for s in (second, first))
    running = expected["groups"][5]
    expected["groups"][5] = (running[0], GroupState.PENDING, *running[2:])
    moved = {GroupState.RUNNING: 1, GroupState.PENDING: 1}
    assert found == expected | {"counts": expected["counts"] | moved}
    assert [g.submitted.group for g in second.open_groups()] == [4, 5]
    assert [g.missing for g in second.open_groups()] == [
        (SessionId(GroupId(4), 0),),
        (SessionId(GroupId(5), 0), SessionId(GroupId(5), 1)),
    ]
    assert [c.step for c in second.committed()] == [1]
    assert list(second.state.taken) == [make.update_id(1), make.update_id(2)]
    assert second.rewarded_group(GroupId(0)).rewards == (0.0, 1.0)


def test_a_rewind_frees_the_groups_of_what_it_voids(storage: MemoryStorage, claim: Claimer) -> None:
    first = claim(storage).start()
    for group in range(3):
        finish(first, group)
    take(first, 1, 1)
    first.append(make.step_done(1))
    first.flush(1)
    base = first.position
    take(first, 2, 1)
    first.append(make.step_done(2))
    first.close("stopped")

    claimed = claim(storage)
    assert claimed.state.last_step == 2
    second = claimed.start(base_position=base)
    assert second.state.last_step == 1
    assert second.oldest_finished(9) == [1, 2]
    assert take(second, 2, 2).groups == (1, 2)
    second.append(make.step_done(2, "of the new branch"))
    second.close("stopped")
    state, report = read_experience(storage)
    state.check()
    assert report.void == 2
    assert state.step_done[GlobalStep(2)].digest == "of the new branch"


def test_every_eviction_is_refilled_once_across_a_crash(
    storage: MemoryStorage, claim: Claimer
) -> None:
    first = claim(storage).start()
    finish(first, 0)
    finish(first, 1, rewards=(1.0, 1.0))
    reasons = [(GroupId(0), EvictionReason.AGE), (GroupId(1), EvictionReason.FILTERED)]
    first.evict(reasons, global_step=GlobalStep(3))
    first.refill([make.submitted(2, step=3)])
    first.flush(1)
    with pytest.raises(LifecycleError, match="2 prompts refill 1 evictions"):
        first.refill([make.submitted(3), make.submitted(4)])

    second = claim(storage.crash()).start()
    assert list(second.state.table.owed) == [1]
    second.refill([make.submitted(3, step=3)])
    second.evict(reasons, global_step=GlobalStep(3))
    assert not second.state.table.owed
    assert second.state.counts[GroupState.EVICTED] == 2


def test_a_refill_is_on_disk_with_its_group_or_not_at_all(
    storage: MemoryStorage, claim: Claimer
) -> None:
    first = claim(storage).start()
    finish(first, 0)
    first.evict([(GroupId(0), EvictionReason.AGE)], global_step=GlobalStep(1))
    first.flush(1)
    first.refill([make.submitted(1)])
    for found in storage.crash_states():
        state, _ = read_experience(found)
        assert len(state.table.owed) == 2 - state.table.next_group
    first.flush(1)
    assert not read_experience(storage)[0].table.owed


def test_of_a_batch_with_an_illegal_record_the_legal_part_is_logged(
    storage: MemoryStorage, claim: Claimer
) -> None:
    store = claim(storage).start()
    with pytest.raises(LifecycleError):
        store.submit([make.submitted(0), make.submitted(7)])
    store.flush(1)
    assert store.state.table.next_group == 1
    assert read_experience(storage)[0].table.next_group == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(store: ExperienceStore, reward: float) -> None:
    store.submit([make.submitted(0)])
    with pytest.raises(TrainingError, match=r"session g0\.s0"):
        store.session_done(make.trajectory(0, 0), reward=reward)
    assert store.open_groups()[0].missing[0] == SessionId(GroupId(0), 0)


def test_records_of_the_log_itself_are_not_appended_by_hand(store: ExperienceStore) -> None:
    with pytest.raises(AssertionError):
        store.append(make.session_done(0, 0))


def test_a_session_may_not_start_in_a_terminal_group(store: ExperienceStore) -> None:
    finish(store, 0)
    with pytest.raises(LifecycleError, match="illegal while finished"):
        store.start_sessions([SessionId(GroupId(0), 0)])


def test_a_store_says_whether_the_run_is_still_its_own(
    storage: MemoryStorage, claim: Claimer
) -> None:
    old = claim(storage).start()
    assert old.is_highest
    new = claim(storage.open_as_new_process(), take_over=True).start()
    assert (old.is_highest, new.is_highest) == (False, True)


def test_the_first_failure_is_final(storage: MemoryStorage, claim: Claimer) -> None:
    old = claim(storage).start()
    new = claim(storage.open_as_new_process(), take_over=True).start()
    future = old.submit([make.submitted(0)])
    with pytest.raises(FencedError) as fenced:
        old.flush(1)
    assert future.exception(0) is fenced.value
    for call in (
        lambda: old.submit([make.submitted(1)]),
        lambda: old.start_sessions([SessionId(GroupId(0), 0)]),
        lambda: old.append(make.published(1)),
        lambda: old.session_done(make.trajectory(0, 0), reward=0.0),
        old.urge,
        lambda: old.flush(1),
        lambda: old.close("end"),
    ):
        with pytest.raises(FencedError) as again:
            call()
        assert again.value is fenced.value
    assert new.submit([make.submitted(0)]) is not future
    new.flush(1)


def test_a_full_disk_is_one_clear_error_and_loses_nothing_acknowledged(
    storage: MemoryStorage, claim: Claimer
) -> None:
    plan = [
        StorageFault(StorageFaultKind.NO_SPACE, hit=hit, path_contains="control-")
        for hit in range(4, 20)
    ]
    full = FaultyStorage(storage, plan=plan)
    store = claim(full).start()
    finish(store, 0)
    store.flush(1)
    store.submit([make.submitted(1)])
    with pytest.raises(StorageError):
        store.flush(1)
    with pytest.raises(StorageError):
        store.close("end")
    assert full.fired[StorageFaultKind.NO_SPACE] > 0
    state, _ = read_experience(storage)
    assert state.table.state_of(GroupId(0)) is GroupState.FINISHED


def test_nothing_starts_after_somebody_else_claimed(storage: MemoryStorage, claim: Claimer) -> None:
    slow = claim(storage)
    claim(storage.open_as_new_process(), take_over=True).start()
    with pytest.raises(FencedError):
        slow.start()
    assert read_experience(storage)[0].incarnations[-1].incarnation == 2


def test_a_held_run_is_refused_until_it_is_let_go(storage: MemoryStorage, claim: Claimer) -> None:
    claimed = claim(storage)
    with pytest.raises(RunBusyError, match="take-over"):
        claim(storage.open_as_new_process())
    claimed.release()
    claimed.release()
    again = claim(storage.open_as_new_process())
    assert (again.incarnation, again.parent) == (2, 0)


def test_a_damaged_log_stops_the_claim_and_lets_the_run_go(
    storage: MemoryStorage, claim: Claimer
) -> None:
    store = claim(storage).start()
    finish(store, 0)
    store.close("end")
    name = "log/control-000001-000000.plog"
    data = bytearray(storage.read(name))
    data[200] ^= 1
    storage.damage(name, bytes(data))
    for _ in range(2):
        with pytest.raises(DamagedError):
            claim(storage)
    with pytest.raises(DamagedError):
        read_experience(storage)


def test_reading_needs_a_run_and_changes_nothing(storage: MemoryStorage, claim: Claimer) -> None:
    with pytest.raises(NothingToResumeError):
        read_experience(MemoryStorage())
    with pytest.raises(NothingToResumeError):
        claim(MemoryStorage())
    assert read_experience(storage)[0].table.next_group == 0
    store = claim(storage).start()
    finish(store, 0)
    store.flush(1)
    store.submit([make.submitted(1)])
    before = storage.operations
    state, report = read_experience(storage)
    assert storage.operations == before
    assert state.table.next_group == 1
    assert report.records > 4
    store.flush(1)
    assert read_experience(storage)[0].table.next_group == 2


def test_what_was_claimed_and_cut_is_an_event(storage: MemoryStorage, claim: Claimer) -> None:
    seen: list[tuple[str, dict[str, object]]] = []

    def events(name: str, fields: dict[str, object]) -> None:
        seen.append((name, fields))

    store = claim(storage).start()
    finish(store, 0)
    store.flush(1)
    name = "log/control-000001-000000.plog"
    storage.damage(name, storage.read(name) + b"torn")
    claimed = claim(storage.open_as_new_process(), take_over=True, events=events)
    assert claimed.report.tails
    assert seen == [
        ("claimed", {"incarnation": 2, "parent": 1, "took_over": True}),
        (
            "log_tail_cut",
            {"incarnation": 1, "stream": "control", "segment": 0, "bytes": 4, "why": "fenced"},
        ),
    ]
    claimed.release()
    seen.clear()
    again = claim(storage.open_as_new_process(), take_over=True, events=events)
    assert again.report.tails
    assert [name for name, _ in seen] == ["claimed"]


def test_a_checkpoint_counts_until_it_is_collected(store: ExperienceStore) -> None:
    warm = make.checkpointed(5, store.position, phase="warm")
    store.commit(warm)
    store.commit(make.checkpointed(0, store.position))
    assert [c.phase for c in store.committed()] == ["warm", "train"]
    store.collect(Collect((warm.directory,)))
    assert [c.phase for c in store.committed()] == ["train"]


def test_trajectories_that_no_checkpoint_needs_are_gone_and_the_rest_are_read(
    store: ExperienceStore,
) -> None:
    for step in (1, 2):
        finish(store, step - 1)
        take(store, step, 1)
        store.append(make.step_done(step))
        store.flush(1)
        store.commit(make.checkpointed(step, store.position))
    store.collect(Collect((make.checkpointed(9, store.position).directory,)))
    with pytest.raises(LifecycleError, match="while trained"):
        store.rewarded_group(GroupId(0))
    assert store.rewarded_group(GroupId(1)).rewards == (0.0, 1.0)


def test_urge_resolves_with_everything_appended_so_far(
    storage: MemoryStorage, claim: Claimer
) -> None:
    store = claim(storage, options=LogOptions(linger_s=0.0)).start()
    assert store.urge().result(5) == store.position
    store.submit([make.submitted(0)])
    last = store.submit([make.submitted(1)])
    position = store.urge().result(5)
    assert last.done()
    assert position == store.position
    store.close("end")
    assert read_experience(storage)[0].closed[0].reason == "end"


def test_checkpoints_are_committed_from_another_thread_while_sessions_arrive(
    storage: MemoryStorage, claim: Claimer
) -> None:
    store = claim(storage, options=LogOptions(linger_s=0.0)).start()

    def commit_and_collect() -> None:
        for number in range(40):
            record = dataclasses.replace(
                make.checkpointed(0, store.position), directory=f"step-00000000-{number}"
            )
            store.commit(record).result(5)
            if number:
                store.collect(Collect((f"step-00000000-{number - 1}",))).result(5)

    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit_and_collect)
        for step in range(1, 41):
            finish(store, step - 1)
            take(store, step, 1)
            store.append(make.step_done(step))
        committing.result(20)
    store.close("end")
    state, _ = read_experience(storage)
    state.check()
    assert make.comparable(state, places=False) == make.comparable(store.state, places=False)
    assert [c.directory for c in state.checkpoints] == ["step-00000000-39"]


def test_an_incarnation_starts_once(storage: MemoryStorage, claim: Claimer) -> None:
    claimed = claim(storage)
    claimed.start()
    with pytest.raises(AssertionError, match="starts once"):
        claimed.start()
