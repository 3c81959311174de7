"""Crash everywhere with replay: the previous or the new checkpoint comes back with all its rows."""

from __future__ import annotations

from typing import Any

import pytest
from replay_cases import ReplayRun, rows, small_ring, values_of

from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.storage import (
    CrashMode,
    FaultyStorage,
    MemoryStorage,
    PowerLost,
    StorageFault,
    StorageFaultKind,
)

APPENDED = [0, 3, 6, 10, 15]
"""Rows ever appended at each step; a segment has 4, the ring 8."""


def run_of(storage: MemoryStorage, *, keep: int, incarnation: int = 1, **more: Any) -> ReplayRun:
    return ReplayRun(storage, small_ring(8), keep=keep, incarnation=incarnation, **more)


def go_on(run: ReplayRun, step: int) -> None:
    total = run.replay.total
    run.replay.append(rows(total, APPENDED[step] - total))
    run.save(step)


def saved_until_power_lost(storage: MemoryStorage, keep: int) -> int:
    """The last step whose save had returned when the power went."""
    saved = [0]

    def run_all() -> None:
        run = run_of(storage, keep=keep)
        for step in range(1, len(APPENDED)):
            go_on(run, step)
            saved.append(step)

    with pytest.raises(PowerLost):
        run_all()
    return saved[-1]


def check_found(storage: MemoryStorage, done: int, *, keep: int) -> None:
    run = run_of(storage, keep=keep, incarnation=2)
    if not run.ledger.committed():
        assert done == 0
        return
    step = run.restore()
    assert step in (done, done + 1)
    assert run.counters["global_step"] == step
    total = APPENDED[step]
    assert values_of(run.replay) == list(range(max(0, total - 8), total))
    assert all(run.engine.verify(record.directory).ok for record in run.ledger.committed())


def operations(keep: int) -> int:
    storage = MemoryStorage()
    run = run_of(storage, keep=keep)
    for step in range(1, len(APPENDED)):
        go_on(run, step)
    assert run.engine.last_error is None
    return storage.operations


@pytest.mark.parametrize("keep", [1, 2])
def test_every_operation_may_be_the_last(keep: int) -> None:
    for operation in range(operations(keep)):
        storage = MemoryStorage(seed=operation)
        storage.fail_after = operation
        done = saved_until_power_lost(storage, keep)
        modes = [CrashMode.NOTHING_KEPT, CrashMode.NAMES_KEPT, CrashMode.RANDOM]
        for state in [storage.process_kill(), *(storage.crash(mode) for mode in modes)]:
            check_found(state, done, keep=keep)


def test_every_legal_state_after_a_power_loss() -> None:
    start = MemoryStorage()
    run = run_of(start, keep=1)
    marks: list[int] = []
    for step in range(1, len(APPENDED)):
        go_on(run, step)
        marks.append(start.operations)
    for operation in range(marks[-2], marks[-1]):
        storage = MemoryStorage(seed=operation)
        storage.fail_after = operation
        done = saved_until_power_lost(storage, 1)
        for state in storage.crash_states():
            check_found(state, done, keep=1)


def test_the_next_incarnation_goes_on_and_nothing_is_left_over() -> None:
    for operation in range(0, operations(1), 2):
        storage = MemoryStorage(seed=operation)
        storage.fail_after = operation
        saved_until_power_lost(storage, 1)
        run = run_of(storage.crash(), keep=1, incarnation=2)
        if run.ledger.committed():
            run.restore()
        run.engine.sweep(run.ledger.collected())
        total = run.replay.total
        run.replay.append(rows(total, 5))
        run.save_well(9)
        again = run_of(run.storage, keep=1, incarnation=3)
        assert again.restore() == 9
        assert values_of(again.replay) == list(range(max(0, total - 3), total + 5))
        again.engine.sweep(again.ledger.collected())
        named = named_by_manifests(again)
        assert {f"segments/replay/{name}" for name in again.files()} == named


def named_by_manifests(run: ReplayRun) -> set[str]:
    """What all manifests name, of committed checkpoints and of whole ones nobody committed."""
    directories = [name for name in run.storage.list("checkpoints") if name != "latest.json"]
    manifests = [run.engine.verify(directory).manifest for directory in directories]
    return {
        one.path
        for manifest in manifests
        if manifest is not None
        for stored in manifest.segments.values()
        for one in stored
    }


SAVE_POINTS = [
    FaultPoint.CHECKPOINT_STAGED,
    FaultPoint.SEGMENT_WRITTEN,
    FaultPoint.SEGMENTS_DURABLE,
    FaultPoint.CHECKPOINT_FILE_WRITTEN,
    FaultPoint.CHECKPOINT_FILES_DURABLE,
    FaultPoint.MANIFEST_WRITTEN,
    FaultPoint.MANIFEST_RENAMED,
    FaultPoint.CHECKPOINT_LOGGED,
    FaultPoint.POINTER_WRITTEN,
    FaultPoint.COLLECT_LOGGED,
    FaultPoint.SEGMENTS_COLLECTED,
    FaultPoint.COLLECTED,
]


@pytest.mark.parametrize("point", SAVE_POINTS, ids=lambda point: point.value)
def test_every_fault_point_loses_nothing(point: FaultPoint) -> None:
    storage = MemoryStorage()
    plan = FaultPlan()
    run = run_of(storage, keep=1, faults=plan)
    for step in (1, 2, 3):
        go_on(run, step)
    plan.rules = (FaultRule(point, plan.hits[point] + 1, FaultAction.RAISE),)
    with pytest.raises(InjectedFault):
        go_on(run, 4)
    assert len(plan.fired) == 1
    committed = SAVE_POINTS.index(point) >= SAVE_POINTS.index(FaultPoint.CHECKPOINT_LOGGED)
    for state in (storage.crash(), storage.process_kill()):
        check_found(state, 4 if committed else 3, keep=1)


def test_segments_are_durable_before_the_manifest_names_them() -> None:
    storage = MemoryStorage()
    run = run_of(storage, keep=1)
    for step in (1, 2, 3):
        go_on(run, step)
    before = storage.operations
    go_on(run, 4)
    done = [(op.kind, op.path) for op in storage.journal[before:]]

    def places(kind: str, start: str) -> list[int]:
        return [i for i, (k, path) in enumerate(done) if k == kind and path.startswith(start)]

    ledger = [i for i, (_, path) in enumerate(done) if path.startswith("ledger/")]

    written = places("sync", "segments/replay/")
    renamed = places("rename", "segments/replay/")
    named = places("sync_dir", "segments/replay")[-2]
    manifest = places("create", "checkpoints/step-00000004-1/.tmp-manifest.json")[0]
    assert len(written) == len(renamed) == 2
    assert max(written) < max(renamed) < named < manifest < ledger[0]
    deleted = places("remove", "segments/replay/")
    gone = places("remove", "checkpoints/step-00000003-1/manifest.json")[0]
    assert deleted
    assert ledger[-1] < min(deleted) <= max(deleted) < gone


def test_restoring_may_be_interrupted_and_repeated() -> None:
    storage = MemoryStorage()
    go_on(run_of(storage, keep=1), 4)
    for point in (FaultPoint.RESTORE_STARTED, FaultPoint.RESTORE_MODEL, FaultPoint.RESTORE_DONE):
        plan = FaultPlan([FaultRule(point, action=FaultAction.RAISE)])
        with pytest.raises(InjectedFault):
            run_of(storage, keep=1, incarnation=2, faults=plan).restore()
        check_found(storage.crash(), 4, keep=1)


def test_whole_segments_are_stored_between_saves() -> None:
    """Every row still reaches the disk once, and the save itself writes only the tail."""
    storage = MemoryStorage()
    run = run_of(storage, keep=1)
    assert not run.engine.store_segments(run.incarnation)
    run.replay.append(rows(0, 7))
    assert run.engine.store_segments(run.incarnation)
    assert run.engine.wait(5)
    assert [name.split("-")[1] for name in run.files()] == ["4"]
    assert not run.engine.store_segments(run.incarnation)
    run.save_well(1)
    assert [name.split("-")[1] for name in run.files()] == ["4", "3"]
    for state in (storage.crash(), storage.process_kill()):
        again = run_of(state, keep=1, incarnation=2)
        assert again.restore() == 1
        assert values_of(again.replay) == list(range(7))


def test_segments_stored_before_a_crash_are_orphans_that_the_next_one_collects() -> None:
    storage = MemoryStorage()
    run = run_of(storage, keep=1)
    run.replay.append(rows(0, 5))
    run.save_well(1)
    run.replay.append(rows(5, 7))
    assert run.engine.store_segments(run.incarnation)
    assert run.engine.wait(5)
    assert len(run.files()) == 4
    again = run_of(storage.crash(), keep=1, incarnation=2)
    assert again.restore() == 1
    assert len(again.engine.sweep(again.ledger.collected())) == 2
    assert values_of(again.replay) == list(range(5))
    assert len(again.files()) == 2


def test_what_cannot_be_stored_beforehand_is_stored_by_the_save() -> None:
    storage = FaultyStorage(
        MemoryStorage(), plan=[StorageFault(StorageFaultKind.NO_SPACE, path_contains=".part")]
    )
    run = ReplayRun(storage, small_ring(8))
    run.replay.append(rows(0, 5))
    assert run.engine.store_segments(run.incarnation)
    assert run.engine.wait(5)
    assert storage.fired[StorageFaultKind.NO_SPACE] == 1
    assert "could not be stored yet" in str(run.events[-1])
    run.save_well(1)
    assert len(run.files()) == 2
