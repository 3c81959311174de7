"""SIGKILL at random moments and at every named fault point: nothing is lost, and it is proven.

Every run is resumed until it is complete and then compared with the uninterrupted one: weights,
optimizer, generators, data order and metrics are bit-identical, and the audit finds nothing skipped
or trained twice.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drill_tools import KILLED, ForkServer, assert_same_training, next_action, run_to_end

from perdure.core.faults import FaultPoint

REMOTE_POINTS = {point for point in FaultPoint if point.value.startswith("remote_")}
"""Passed only by a run with a remote tier: see test_tier_kill.py."""
RECOVERY_POINTS = {
    FaultPoint.RESTORE_STARTED,
    FaultPoint.RESTORE_MODEL,
    FaultPoint.RESTORE_DONE,
    FaultPoint.REDO_STEP,
    FaultPoint.REDO_DONE,
}
"""Passed only while an earlier incarnation's work is restored."""
REPLAY_POINTS = {
    FaultPoint.SEGMENT_WRITTEN,
    FaultPoint.SEGMENTS_DURABLE,
    FaultPoint.SEGMENTS_COLLECTED,
}
"""Passed only by runs with a replay; ``tests/property/test_replay_crash.py`` strikes there."""
POINTS = set(FaultPoint) - REPLAY_POINTS - REMOTE_POINTS
MID_RUN = {"point": "local_update_done", "hit": 7}
"""The fourth step is half done; the last checkpoint lies behind step 2."""


def test_every_point_is_passed_by_a_run(
    server: ForkServer, reference: Path, tmp_path: Path
) -> None:
    """The points the kill tests strike at are those of production."""
    run = tmp_path / "run"
    assert server.run("train", run, plan=[MID_RUN]).status == KILLED
    resumed = server.run("resume", run)
    assert resumed.status == 0, resumed.log
    fresh = server.run("train", tmp_path / "fresh")
    assert fresh.hits.keys() | resumed.hits.keys() == {point.value for point in POINTS}


@pytest.mark.parametrize("hit", [1, 2, 5])
@pytest.mark.parametrize("point", sorted(POINTS - RECOVERY_POINTS, key=lambda p: p.value))
def test_killed_at_a_point_of_training(
    server: ForkServer, reference: Path, tmp_path: Path, point: FaultPoint, hit: int
) -> None:
    run = tmp_path / "run"
    ended = server.run("train", run, plan=[{"point": point.value, "hit": hit}])
    if hit == 1:
        assert ended.status == KILLED, ended.log
    if ended.status == KILLED:
        run_to_end(server, run)
    assert_same_training(run, reference)


@pytest.mark.parametrize("point", sorted(POINTS, key=lambda p: p.value))
def test_killed_while_resuming_twice_in_a_row(
    server: ForkServer, reference: Path, tmp_path: Path, point: FaultPoint
) -> None:
    """Killed in the middle of a step, and then at the same point of two recoveries."""
    run = tmp_path / "run"
    assert server.run("train", run, plan=[MID_RUN]).status == KILLED
    statuses = [server.run("resume", run, plan=[{"point": point.value}]).status for _ in range(2)]
    assert point not in RECOVERY_POINTS or statuses == [KILLED, KILLED]
    if 0 not in statuses:
        run_to_end(server, run)
    assert_same_training(run, reference)


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random_moments(
    server: ForkServer, reference: Path, tmp_path: Path, seed: int
) -> None:
    kill_at_random(server, reference, tmp_path, seed=seed, kills=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1250))
def test_soak_of_random_kills(
    server: ForkServer, reference: Path, tmp_path: Path, seed: int
) -> None:
    kill_at_random(server, reference, tmp_path, seed=seed, kills=5)


def kill_at_random(
    server: ForkServer, reference: Path, runs: Path, *, seed: int, kills: int
) -> None:
    """Kill ``kills`` processes at moments drawn from ``seed``; every run ends as if none had been.

    A run that comes to its end in between is followed by another one.
    """
    rng = random.Random(seed)
    points = [point.value for point in FaultPoint if point in POINTS]
    killed = 0
    while killed < kills:
        run = runs / f"after-{killed}"
        status = KILLED
        while status == KILLED and killed < kills:
            if rng.random() < 0.5:
                options = {"kill_after_s": rng.uniform(0.0, 0.6)}
            else:
                options = {"plan": [{"point": rng.choice(points), "hit": rng.randint(1, 12)}]}
            ended = server.run(next_action(run), run, **options)
            status = ended.status
            assert status in (0, KILLED), ended.log
            killed += status == KILLED
        if status == KILLED:
            run_to_end(server, run)
        assert_same_training(run, reference)
