"""Making and claiming a run: exclusive numbers, the kernel lock, files that must not be missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from log_cases import (
    FLUSH_S,
    HOLDER,
    RUN_ID,
    make_claim,
    make_run,
    open_writer,
    session_done,
    started,
    submitted,
)

from perdure.core.clock import ManualClock
from perdure.core.errors import DamagedError, NothingToResumeError, RunBusyError
from perdure.core.faults import (
    FaultAction,
    FaultPlan,
    FaultPoint,
    FaultRule,
    InjectedFault,
    NoFaults,
)
from perdure.core.ids import IncarnationNumber
from perdure.experience.claims import (
    Holder,
    RunInfo,
    claim,
    create_run,
    highest_incarnation,
    newest_started,
    read_run,
)
from perdure.experience.seals import read_extent, seal_incarnation
from perdure.storage import MemoryStorage, PosixStorage


def test_log_first_of_several_makes_the_run() -> None:
    storage = MemoryStorage()
    info = RunInfo(RUN_ID, 5.0, {"perdure": "1"}, "config", "data")
    assert create_run(storage, info) == info
    assert create_run(storage, dataclasses.replace(info, run_id="f" * 32)) == info
    assert read_run(storage.crash()) == info


def test_log_no_run_is_nothing_to_resume() -> None:
    with pytest.raises(NothingToResumeError, match="there is no run here"):
        read_run(MemoryStorage())


def test_log_missing_run_file_is_damage_where_there_are_incarnations() -> None:
    storage = MemoryStorage()
    make_run(storage)
    make_claim(storage)
    storage.remove("run.json")
    with pytest.raises(DamagedError, match="so it is a run"):
        read_run(storage)


def test_log_claim_of_another_run_is_refused() -> None:
    storage = MemoryStorage()
    make_run(storage)
    with pytest.raises(DamagedError, match="was expected"):
        claim(storage, run_id="f" * 32, clock=ManualClock(), faults=NoFaults(), info=HOLDER)
    assert storage.list("incarnations") == []


def test_log_claims_count_up_and_know_their_parent() -> None:
    storage = MemoryStorage()
    make_run(storage)
    assert highest_incarnation(storage) == 0
    first = make_claim(storage)
    assert (first.incarnation, first.parent, first.took_over) == (1, 0, False)
    first.release()
    second = make_claim(storage)
    assert (second.incarnation, second.parent) == (2, 0)
    writer = open_writer(storage, second)
    writer.append([started(second)])
    writer.flush(FLUSH_S)
    second.release()
    make_claim(storage).release()
    fourth = make_claim(storage)
    assert (fourth.incarnation, fourth.parent) == (4, 2)
    assert storage.list("seals") == ["1.json", "2.json", "3.json"]
    assert newest_started(storage, run_id=RUN_ID, below=2) == 0


def test_log_second_start_is_refused_while_the_first_is_alive() -> None:
    storage = MemoryStorage()
    make_run(storage)
    make_claim(storage)
    other = storage.open_as_new_process()
    with pytest.raises(RunBusyError) as raised:
        make_claim(other)
    assert "incarnation 1, process 1 on host" in str(raised.value)
    assert "--take-over" in str(raised.value)
    assert highest_incarnation(storage) == 1
    taken = make_claim(other, take_over=True)
    assert (taken.incarnation, taken.took_over) == (2, True)
    taken.release()


def test_log_who_took_over_is_a_holder_too() -> None:
    storage = MemoryStorage()
    make_run(storage)
    fenced, taker = storage.open_as_new_process(), storage.open_as_new_process()
    make_claim(fenced)
    make_claim(taker, take_over=True)
    fenced.die()
    with pytest.raises(RunBusyError, match="incarnation 2"):
        make_claim(storage)
    assert highest_incarnation(storage) == 2
    taker.die()
    assert make_claim(storage).took_over is False


def test_log_number_of_whoever_sealed_is_not_used_again() -> None:
    storage = MemoryStorage()
    make_run(storage)
    for _ in range(2):
        make_claim(storage).release()
    storage.remove("incarnations/2.json")
    with pytest.raises(DamagedError, match=r"incarnations/2\.json: the file is missing"):
        make_claim(storage)


def test_log_dead_holder_is_no_obstacle() -> None:
    storage = MemoryStorage()
    make_run(storage)
    holder = storage.open_as_new_process()
    make_claim(holder)
    holder.die()
    assert make_claim(storage).took_over is False


@pytest.mark.parametrize("point", [FaultPoint.CLAIM_LINKED, FaultPoint.CLAIM_SEALED])
def test_log_claim_that_fails_lets_the_next_one_in(point: FaultPoint) -> None:
    storage = MemoryStorage()
    make_run(storage)
    plan = FaultPlan([FaultRule(point, action=FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        make_claim(storage, faults=plan)
    assert len(plan.fired) == 1
    assert make_claim(storage.open_as_new_process()).incarnation == 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_log_missing_incarnation_file_is_damage(number: int) -> None:
    storage = MemoryStorage()
    make_run(storage)
    for _ in range(3):
        claimed = make_claim(storage)
        writer = open_writer(storage, claimed)
        writer.append([started(claimed), submitted(claimed.incarnation)])
        writer.flush(FLUSH_S)
        claimed.release()
    storage.remove(f"incarnations/{number}.json")
    with pytest.raises(DamagedError, match=f"incarnations/{number}.json: the file is missing"):
        make_claim(storage)


def test_log_claim_finds_damage_and_seals_nothing() -> None:
    storage = MemoryStorage()
    make_run(storage)
    claimed = make_claim(storage)
    writer = open_writer(storage, claimed)
    for group in range(3):
        writer.append([*([] if group else [started(claimed)]), submitted(group)])
        writer.flush(FLUSH_S)
    claimed.release()
    path = "log/control-000001-000000.plog"
    data = bytearray(storage.files()[path])
    data[100] ^= 1
    storage.damage(path, bytes(data))
    with pytest.raises(DamagedError, match=f"{path} at byte 0"):
        make_claim(storage)
    assert storage.list("seals") == []


def test_log_claim_tells_of_what_it_sealed_all_that_reading_the_seal_tells() -> None:
    storage = MemoryStorage()
    make_run(storage)
    first = make_claim(storage)
    writer = open_writer(storage, first, segment_bytes=400)
    for entries in ([started(first)], [session_done(0), submitted(0)], [session_done(1)]):
        writer.append(entries)
        writer.flush(FLUSH_S)
    for path in ("log/control-000001-000000.plog", "log/payload-000001-000000.plog"):
        storage.damage(path, storage.read(path) + b"never acknowledged")
    first.release()
    second = make_claim(storage)
    assert second.sealed == {1: read_extent(storage, first.incarnation, run_id=RUN_ID)}
    assert [tail.size for tail in second.sealed[first.incarnation].tails] == [18, 18]
    second.release()
    # Two has written nothing, and one is sealed already.
    assert list(make_claim(storage).sealed) == [2]


def test_log_claim_that_finds_a_seal_believes_the_seal() -> None:
    storage = MemoryStorage()
    make_run(storage)
    first = make_claim(storage)
    writer = open_writer(storage, first)
    writer.append([started(first)])
    writer.close("done")
    first.release()
    assert make_claim(storage).sealed == {}


def test_log_claim_whose_seal_came_second_believes_the_first() -> None:
    storage = MemoryStorage()
    make_run(storage)
    first = make_claim(storage)
    open_writer(storage, first).append([started(first)])
    arguments = (storage, first.incarnation)
    assert seal_incarnation(*arguments, run_id=RUN_ID, sealed_by=IncarnationNumber(2)) is not None
    assert seal_incarnation(*arguments, run_id=RUN_ID, sealed_by=IncarnationNumber(3)) is None


def test_log_holder_is_this_process(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    make_run(storage)
    claimed = claim(storage, run_id=RUN_ID, clock=ManualClock(), faults=NoFaults())
    with pytest.raises(RunBusyError, match=f"process {Holder.here().pid} on"):
        claim(PosixStorage(tmp_path), run_id=RUN_ID, clock=ManualClock(), faults=NoFaults())
    claimed.release()
