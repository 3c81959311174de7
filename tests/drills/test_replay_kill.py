"""kill -9 of a process that saves replay, at every named point and at random moments."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from forked import in_a_process
from replay_cases import ReplayRun, rows, small_ring, values_of

from perdure.core.faults import FaultPlan, FaultPoint, FaultRule
from perdure.storage import PosixStorage

CAPACITY = 40
POINTS = [
    FaultPoint.CHECKPOINT_STAGED,
    FaultPoint.SEGMENT_WRITTEN,
    FaultPoint.SEGMENTS_DURABLE,
    FaultPoint.CHECKPOINT_FILES_DURABLE,
    FaultPoint.MANIFEST_RENAMED,
    FaultPoint.CHECKPOINT_LOGGED,
    FaultPoint.COLLECT_LOGGED,
    FaultPoint.SEGMENTS_COLLECTED,
    FaultPoint.COLLECTED,
]


def rows_at(step: int) -> int:
    return 7 * step


def go_on(root: Path, incarnation: int, plan: FaultPlan, *, steps: int) -> None:
    """What a process does: restore, sweep, then append, store and save."""
    replay = small_ring(CAPACITY, 5)
    run = ReplayRun(PosixStorage(root), replay, keep=1, incarnation=incarnation, faults=plan)
    step = run.restore() if run.ledger.committed() else 0
    check(run, step)
    run.engine.sweep(run.ledger.collected())
    for number in range(step + 1, step + 1 + steps):
        replay.append(rows(replay.total, rows_at(number) - replay.total))
        run.engine.store_segments(run.incarnation)
        run.save_well(number)


def check(run: ReplayRun, step: int) -> None:
    total = rows_at(step)
    assert values_of(run.replay) == list(range(max(0, total - CAPACITY), total))
    assert all(run.engine.verify(record.directory).ok for record in run.ledger.committed())


@pytest.mark.parametrize("hit", [1, 2, 4])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.value)
def test_killed_at_a_point(tmp_path: Path, point: FaultPoint, hit: int) -> None:
    plan = FaultPlan([FaultRule(point, hit)])
    assert in_a_process(lambda: go_on(tmp_path, 1, plan, steps=12)) == -signal.SIGKILL
    assert in_a_process(lambda: go_on(tmp_path, 2, plan, steps=12)) == -signal.SIGKILL
    assert in_a_process(lambda: go_on(tmp_path, 3, FaultPlan(), steps=2)) == 0
    left_over = len(PosixStorage(tmp_path).list("segments/replay"))
    assert left_over <= 2 * (CAPACITY // 5 + 4)


@pytest.mark.parametrize(
    "kills", [40, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    for incarnation in range(1, kills + 1):
        status = in_a_process(
            lambda number=incarnation: go_on(tmp_path, number, FaultPlan(), steps=500),
            kill_after_s=rng.uniform(0.0, 0.15),
        )
        assert status == -signal.SIGKILL
    assert in_a_process(lambda: go_on(tmp_path, kills + 1, FaultPlan(), steps=1)) == 0
