"""A loop around the engine: restoring, safe points, leaving, stopping, being fenced."""

from __future__ import annotations

import subprocess
import sys

import pytest
from standalone_loops import (
    Gate,
    Script,
    StillClock,
    committed,
    crashed,
    full_at,
    manifest_of,
    read_log,
    uninterrupted,
)

from perdure import CheckpointEngine, every
from perdure.core.errors import (
    ConfigError,
    DamagedError,
    FencedError,
    RunBusyError,
    StorageError,
)
from perdure.core.faults import FaultPoint
from perdure.storage import MemoryStorage, StorageFaultKind

WAIT_S = 20.0


def test_a_fresh_run_saves_when_due_and_at_the_end() -> None:
    script = Script(MemoryStorage(), keep=9)
    assert script.run() == 40
    assert committed(script.storage) == [10, 20, 30, 40]
    assert script.engine.restored_from is None


def test_only_the_newest_are_kept() -> None:
    script = Script(MemoryStorage(), keep=2)
    script.run()
    assert committed(script.storage) == [30, 40]
    assert script.storage.list("checkpoints") == [
        "latest.json",
        "step-00000030-1",
        "step-00000040-1",
    ]


@pytest.mark.parametrize("step", [1, 10, 11, 25, 40])
def test_the_same_line_goes_on_after_an_exception(step: int) -> None:
    storage = MemoryStorage()
    crashed(storage, step)
    again = Script(storage)
    again.run()
    assert again.state() == uninterrupted()
    saved = (step - 1) // 10 * 10
    from_step = again.engine.restored_from.step if again.engine.restored_from else 0
    assert from_step == saved


def test_break_leaves_the_step_incomplete() -> None:
    storage = MemoryStorage()
    script = Script(storage)
    assert script.run(each=lambda step: step == 20) == 19
    assert committed(storage) == [10]
    again = Script(storage)
    assert again.run() == 40
    assert again.state() == uninterrupted()


def test_a_finished_run_has_nothing_left_to_do() -> None:
    storage = MemoryStorage()
    Script(storage).run()
    again = Script(storage)
    assert list(again.engine.steps(40)) == []
    assert again.engine.step == 40
    assert again.state() == uninterrupted()


def test_a_second_loop_of_one_process_goes_back_to_what_was_saved() -> None:
    script = Script(MemoryStorage())
    script.run(each=lambda step: step == 25)
    assert script.run() == 40
    assert script.state() == uninterrupted()


def test_a_second_loop_without_anything_saved_is_refused() -> None:
    script = Script(MemoryStorage())
    script.run(each=lambda step: step == 5)
    with pytest.raises(ConfigError, match="trained already"):
        script.run()


def test_an_iterator_dropped_late_leaves_the_next_loop_alone() -> None:
    storage = MemoryStorage()
    script = Script(storage)
    old = script.engine.steps(40)
    for _ in range(12):
        next(old)
    script.engine.close()
    script.run(each=lambda step: old.close() if step == 20 else None)
    assert committed(storage)[-1] == 40


def test_parts_are_not_aliased_by_what_was_loaded() -> None:
    storage = MemoryStorage()
    Script(storage).run(20)
    one, two = Script(storage), Script(storage)
    one.run(20)
    one.array += 99
    two.run(20)
    assert two.array.tolist() == [210, 210]


def test_load_save_load_save_gives_equal_bytes() -> None:
    storage = MemoryStorage()
    Script(storage, keep=9).run(10)
    for total in (11, 12, 13):
        script = Script(storage, keep=9)
        script.run(total, change_total=True)
    files = [
        {path: entry.sums for path, entry in manifest.files.items()}
        for manifest in map(manifest_of(storage), read_log(storage)[0].checkpoints)
    ]
    assert len(files) == 4
    fresh = MemoryStorage()
    Script(fresh).run(13)
    last = manifest_of(fresh)(read_log(fresh)[0].checkpoints[-1])
    assert files[-1] == {path: e.sums for path, e in last.files.items()} | {
        # Where the log stands differs.
        "experience.msgpack": files[-1]["experience.msgpack"]
    }


class TestTotals:
    def test_what_is_left_of_the_total_is_run(self) -> None:
        storage = MemoryStorage()
        crashed(storage, 31)
        again = Script(storage)
        assert sum(1 for _ in again.engine.steps(40)) == 10

    def test_another_total_is_refused_unless_told(self) -> None:
        storage = MemoryStorage()
        crashed(storage, 15)
        with pytest.raises(ConfigError, match=r"steps\(50\) at step 10 of 40"):
            Script(storage).run(50)
        longer = Script(storage)
        assert longer.run(50, change_total=True) == 50
        assert longer.state() == uninterrupted(50)

    def test_the_total_may_be_left_out_when_resuming(self) -> None:
        storage = MemoryStorage()
        with pytest.raises(ConfigError, match="number of steps is missing"):
            Script(storage).run(None)
        crashed(storage, 15)
        assert Script(storage).run(None) == 40


class TestOnDemand:
    def test_a_request_waits_for_the_safe_point(self) -> None:
        script = Script(MemoryStorage(), keep=9)
        seen: list[list[int]] = []

        def each(step: int) -> None:
            if step == 13:
                script.engine.save()
                seen.append(committed(script.storage))

        script.run(each=each)
        assert seen == [[10]]
        assert committed(script.storage) == [10, 13, 20, 30, 40]

    def test_a_request_that_finds_no_arena_stays(self) -> None:
        gate = Gate(FaultPoint.CHECKPOINT_FILES_DURABLE)
        script = Script(MemoryStorage(), save=every(steps=1, budget=1.0), faults=gate, keep=9)

        def each(step: int) -> None:
            if step == 4:
                script.engine.save()
            if step == 6:
                gate.open()
                script.wait()

        script.run(6, each=each, hurry=True)
        assert script.engine.step == 6
        names = script.events.names()
        assert names.count("checkpoint_skipped") == 3
        assert committed(script.storage) == [1, 2, 6]


class TestTwoProcesses:
    def test_the_second_is_refused_while_the_first_lives(self) -> None:
        storage = MemoryStorage()
        refused: list[bool] = []

        def each(step: int) -> None:
            if step == 5:
                with pytest.raises(RunBusyError):
                    Script(storage).run()
                refused.append(True)

        first = Script(storage)
        assert first.run(each=each) == 40
        assert refused == [True]
        assert first.state() == uninterrupted()

    def test_one_that_was_taken_over_stops_and_changes_nothing(self) -> None:
        storage = MemoryStorage()
        second = Script(storage, take_over=True, keep=9)

        def each(step: int) -> None:
            if step == 15:
                second.run()

        first = Script(storage, keep=9)
        with pytest.raises(FencedError):
            first.run(each=each)
        assert first.engine.step <= 21
        assert committed(storage) == [10, 20, 30, 40]
        assert second.state() == uninterrupted()
        third = Script(storage)
        assert third.run() == 40
        assert third.engine.restored_from is not None
        assert third.engine.restored_from.name == "step-00000040-2"


class TestDamage:
    def test_the_newest_is_damaged_and_the_one_before_is_used(self) -> None:
        storage = MemoryStorage()
        crashed(storage, 35)
        path = "checkpoints/step-00000030-1/state.msgpack"
        data = storage.read(path)
        storage.write_atomic(path, data[: len(data) // 2])
        again = Script(storage)
        again.run()
        found = again.engine.restored_from
        assert found is not None
        assert found.step == 20
        assert [name for name, _ in found.skipped] == ["step-00000030-1"]
        assert "state.msgpack" in found.skipped[0][1]
        assert storage.list("quarantine") == ["step-00000030-1", "step-00000030-1.reason.json"]
        assert again.state() == uninterrupted()

    def test_nothing_whole_is_never_a_fresh_start(self) -> None:
        storage = MemoryStorage()
        crashed(storage, 15)
        storage.remove("checkpoints/step-00000010-1/state.msgpack")
        script = Script(storage)
        with pytest.raises(DamagedError, match="none of 1"):
            script.run()
        assert script.counters == {"total": 0}

    def test_a_run_without_its_run_json_is_no_fresh_start(self) -> None:
        storage = MemoryStorage()
        crashed(storage, 15)
        for path in ("run.json", "log", "incarnations", "seals"):
            storage.remove(path)
        with pytest.raises(DamagedError, match=r"run\.json is missing"):
            Script(storage).run()

    def test_a_last_save_that_fails_is_raised(self) -> None:
        storage = full_at("step-00000005")
        with pytest.raises(StorageError, match="No space"):
            Script(storage).run(5)
        assert storage.fired[StorageFaultKind.NO_SPACE] == 1

    def test_a_save_in_the_middle_that_fails_is_reported_and_training_goes_on(self) -> None:
        script = Script(full_at("step-00000010"), keep=9)
        errors: list[object] = []
        script.run(each=lambda step: errors.append(script.engine.last_error))
        assert isinstance(errors[10], StorageError)
        assert errors[20] is None
        assert "checkpoint_failed" in script.events.names()
        assert committed(script.storage) == [20, 30, 40]


def test_manual_loops_have_the_same_safe_points() -> None:
    storage = MemoryStorage()
    for expected in (0, 6):
        counters = {"n": 0}
        engine = CheckpointEngine("run", save=every(steps=3), storage=storage, clock=StillClock())
        engine.register(counters=counters)
        engine.start(8)
        with engine:
            assert counters["n"] == expected == engine.step
            while engine.step < (7 if expected == 0 else 8):
                counters["n"] += 1
                engine.complete_step()
    assert counters == {"n": 8}
    assert committed(storage)[-1] == 8
    with pytest.raises(ConfigError, match="before the run was opened"):
        engine.complete_step()


def test_a_step_after_the_last_one_is_refused() -> None:
    script = Script(MemoryStorage())
    script.engine.start(2)
    script.engine.complete_step()
    script.engine.complete_step()
    with pytest.raises(ConfigError, match="after the last one, 2"):
        script.engine.complete_step()
    script.engine.close()
    assert committed(script.storage) == [2]


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, perdure; assert 'numpy' not in sys.modules\n"
        "from perdure import CheckpointEngine, every\n"
        "assert not {'torch', 'tensorboard', 'pydantic'} & set(sys.modules)\n"
        "assert CheckpointEngine.__module__ == 'perdure.standalone.engine'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
