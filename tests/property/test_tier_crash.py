"""Whatever the moment: the remote pointer leads to a whole checkpoint and a log that fits it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import experience_records as make
import pytest
from tier_cases import (
    OPTIONS,
    BreakingObjects,
    Died,
    TieredRun,
    check_no_leftovers,
    context,
    memory_objects,
    resumed_elsewhere,
)

from perdure.checkpoint.tier import (
    ObjectStore,
    ObstoreObjects,
    RemoteUnavailableError,
    TierOptions,
    pull,
    read_head,
)
from perdure.checkpoint.tier.log_files import log_cut
from perdure.core.clock import SystemClock
from perdure.core.errors import FencedError, NothingToResumeError
from perdure.core.faults import (
    FaultAction,
    FaultHook,
    FaultPlan,
    FaultPoint,
    FaultRule,
    InjectedFault,
    NoFaults,
)
from perdure.core.storage_api import Storage
from perdure.experience import LogOptions, RunInfo, claim_experience, create_run, read_experience
from perdure.storage import MemoryStorage, PosixStorage

ONE: TierOptions = dataclasses.replace(OPTIONS, keep=1, parallel=1)
SHIPPING = [
    FaultPoint.REMOTE_PIECE_STORED,
    FaultPoint.REMOTE_MANIFEST_STORED,
    FaultPoint.REMOTE_LOG_STORED,
    FaultPoint.REMOTE_HEAD_SWAPPED,
    FaultPoint.REMOTE_DROPPED,
]
SAVES = 3


def check_pulled(objects: ObstoreObjects, confirmed: list[int], *, trained: int) -> None:
    """An empty machine resumes from what was confirmed, or something newer."""
    try:
        target = read_head(objects).target
    except NothingToResumeError:
        target = None
    if target is None:
        assert not confirmed
        return
    other = resumed_elsewhere(objects)
    assert max(confirmed, default=1) <= other.restored_step <= other.step <= trained


def requests_of_all_saves() -> int:
    counting = BreakingObjects(memory_objects())
    ship_saves(TieredRun(MemoryStorage(), keep=1), counting, [])
    return len(counting.requests)


def ship_saves(
    run: TieredRun,
    objects: ObjectStore,
    confirmed: list[int],
    *,
    saves: int = SAVES,
    faults: FaultHook | None = None,
) -> None:
    """Save and ship a few times; what a finished push has shipped is confirmed."""
    for _ in range(saves):
        run.train_and_save()
        run.push(objects, options=ONE, faults=faults or NoFaults())
        confirmed.append(run.step)
        run.train()


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_every_request_may_be_the_last(done: bool) -> None:
    count = requests_of_all_saves()
    assert count > 60
    for number in range(count):
        objects = memory_objects()
        storage = MemoryStorage()
        run = TieredRun(storage, keep=1)
        breaking = BreakingObjects(objects, {number: (Died(), done)})
        confirmed: list[int] = []
        with pytest.raises(Died):
            ship_saves(run, breaking, confirmed)
        check_pulled(objects, confirmed, trained=run.step)
        run.release()
        after = TieredRun(storage, keep=1)
        after.train_and_save()
        head = after.push(objects, options=ONE)
        assert head.target is not None
        assert head.target.step == after.step
        check_no_leftovers(objects)
        assert resumed_elsewhere(objects).restored_step == after.step


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_every_request_of_the_next_incarnation_may_be_the_last(done: bool) -> None:
    """Then the disk is lost as well: another machine resumes, and ships."""
    for number in itertools.count():
        objects = memory_objects()
        storage = MemoryStorage()
        run = TieredRun(storage, keep=1)
        ship_saves(run, objects, [], saves=2)
        run.train()
        run.release()
        after = TieredRun(storage, keep=1)
        breaking = BreakingObjects(objects, {number: (Died(), done)})
        with contextlib.suppress(Died):
            ship_saves(after, breaking, [], saves=1)
        check_pulled(objects, [3], trained=after.step)
        other = resumed_elsewhere(objects)
        other.train_and_save()
        other.push(objects, options=ONE)
        assert resumed_elsewhere(objects).restored_step == other.step
        if not breaking.broke:
            break
    assert number > 20


def test_every_answer_may_be_lost_once() -> None:
    count = requests_of_all_saves()
    for number in range(count):
        objects = memory_objects()
        run = TieredRun(MemoryStorage(), keep=1)
        lost = BreakingObjects(objects, {number: (RemoteUnavailableError("lost"), True)})
        confirmed: list[int] = []
        ship_saves(run, lost, confirmed)
        assert lost.broke == 1
        check_pulled(objects, confirmed, trained=run.step)


@pytest.mark.parametrize("hit", [1, 2, 4])
@pytest.mark.parametrize("point", SHIPPING)
def test_every_fault_point_may_be_the_last(point: FaultPoint, hit: int) -> None:
    objects = memory_objects()
    storage = MemoryStorage()
    run = TieredRun(storage, keep=1)
    plan = FaultPlan([FaultRule(point, hit, FaultAction.RAISE)])
    confirmed: list[int] = []
    with pytest.raises(InjectedFault):
        ship_saves(run, objects, confirmed, saves=6, faults=plan)
    assert plan.fired
    check_pulled(objects, confirmed, trained=run.step)
    run.release()
    after = TieredRun(storage)
    after.train_and_save()
    after.push(objects, options=ONE)
    assert resumed_elsewhere(objects).restored_step == after.step


class Meanwhile:
    """A fault hook that lets something else happen at one point, once."""

    def __init__(self, point: FaultPoint, hit: int, action: Callable[[], None]) -> None:
        self.left = hit
        self.happened = False
        self._point = point
        self._action = action

    def reach(self, point: FaultPoint) -> None:
        if point is self._point:
            self.left -= 1
            if self.left == 0:
                self._action()
                self.happened = True


@pytest.mark.parametrize("hit", [1, 2, 3, 5])
@pytest.mark.parametrize("point", SHIPPING)
def test_a_zombie_that_wakes_anywhere_changes_nothing(point: FaultPoint, hit: int) -> None:
    """While it sleeps, the run is resumed on another machine, which ships and drops."""
    objects = memory_objects()
    run = TieredRun(MemoryStorage(), keep=1)
    run.train_and_save()
    run.push(objects, options=ONE)
    others: list[TieredRun] = []

    def resume_elsewhere() -> None:
        other = resumed_elsewhere(objects, keep=1)
        for _ in range(2):
            other.train_and_save()
            other.push(objects, options=ONE)
        others.append(other)

    meanwhile = Meanwhile(point, hit, resume_elsewhere)
    with pytest.raises(FencedError, match="holds the remote tier|remote tier goes on there"):
        ship_saves(run, objects, [], saves=6, faults=meanwhile)
    assert meanwhile.happened
    (other,) = others
    head = read_head(objects)
    assert head.incarnation == other.incarnation
    assert resumed_elsewhere(objects).restored_step == other.step
    with pytest.raises(FencedError):
        run.push(objects, options=ONE)


def test_a_disk_whose_run_went_on_elsewhere_never_ships_again() -> None:
    objects = memory_objects()
    storage = MemoryStorage()
    run = TieredRun(storage)
    run.train_and_save()
    run.push(objects)
    other = resumed_elsewhere(objects)
    other.train_and_save()
    other.push(objects)
    before = read_head(objects)
    for _ in range(3):
        run.release()
        # The same number as the other machine's incarnation, then higher ones.
        run = TieredRun(storage)
        run.train_and_save()
        with pytest.raises(FencedError, match="pull it into a new directory"):
            run.push(objects)
    assert read_head(objects) == before
    run.release()
    with pytest.raises(FencedError):
        pull(storage, objects, context=context())
    assert resumed_elsewhere(objects).restored_step == other.step


def test_the_next_incarnation_on_the_same_disk_takes_the_pointer_over() -> None:
    objects = memory_objects()
    storage = MemoryStorage()
    run = TieredRun(storage)
    run.train_and_save()
    run.push(objects)
    second = TieredRun(storage, take_over=True)
    second.train_and_save()
    second.push(objects)
    run.ledger = second.ledger
    with pytest.raises(FencedError, match="incarnation 2 holds the remote tier"):
        run.push(objects)
    assert resumed_elsewhere(objects).restored_step == second.step


def copy_cut(source: Storage, cut: dict[str, int]) -> MemoryStorage:
    """Another machine that got exactly these bytes of the log."""
    target = MemoryStorage()
    files = {f"log/{name}": source.read(f"log/{name}", 0, length) for name, length in cut.items()}
    files |= {path: source.read(path) for path in ("incarnations/1.json", "run.json")}
    for folder in ("log", "incarnations", "seals"):
        target.make_dirs(folder)
    for path, data in files.items():
        file = target.create_append(path)
        file.append([data])
        file.sync()
        file.close()
    return target


def test_a_cut_beside_a_busy_writer_is_always_readable(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    create_run(storage, RunInfo("f" * 32, 1.0))
    options = LogOptions(segment_bytes=1 << 14, linger_s=0.0)
    claimed = claim_experience(storage, clock=SystemClock(), faults=NoFaults(), options=options)
    store = claimed.start()
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        group = 0
        while not stop.is_set():
            store.submit([make.submitted(group)])
            for index in range(2):
                store.session_done(make.trajectory(group, index), reward=1.0)
            written.append(group)
            group += 1
            if group % 8 == 0:
                store.flush(30)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen: list[int] = []
        deadline = time.monotonic() + 60
        while len(seen) < 40 or seen[-1] < 20:
            assert time.monotonic() < deadline
            copied = copy_cut(storage, log_cut(storage, upto=claimed.incarnation))
            if copied.list("log"):
                state, _ = read_experience(copied)
                seen.append(int(state.table.next_group))
    finally:
        stop.set()
        writer.join(timeout=60)
        store.close("done")
    assert seen == sorted(seen)
    assert len(set(seen)) > 3, "the log grew meanwhile"
