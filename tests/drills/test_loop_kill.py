"""SIGKILL of a script around ``CheckpointEngine``: the checkpoint before or the new one, always.

Every script is started again, with the same line, until it is complete, and then its last
checkpoint equals that of a script that nothing happened to, bit for bit: parameters, optimizer,
schedule, replay, counters, generators.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drill_tools import KILLED, ForkServer, command

from perdure.audit import audit_run
from perdure.checkpoint import CheckpointReader, verify
from perdure.core.errors import FencedError, RunBusyError
from perdure.core.faults import FaultPoint
from perdure.experience import ExperienceState, read_experience
from perdure.standalone import tree
from perdure.storage import PosixStorage

STEPS = 60
POINTS = sorted(
    {
        FaultPoint.CLAIM_LINKED,
        FaultPoint.CLAIM_SEALED,
        FaultPoint.LOG_CONTROL_WRITTEN,
        FaultPoint.LOG_FSYNCED,
        FaultPoint.LOG_SEGMENT_OPENED,
        FaultPoint.CHECKPOINT_STAGED,
        FaultPoint.CHECKPOINT_FILE_WRITTEN,
        FaultPoint.CHECKPOINT_FILES_DURABLE,
        FaultPoint.MANIFEST_WRITTEN,
        FaultPoint.MANIFEST_RENAMED,
        FaultPoint.CHECKPOINT_LOGGED,
        FaultPoint.POINTER_WRITTEN,
        FaultPoint.COLLECT_LOGGED,
        FaultPoint.COLLECTED,
        FaultPoint.STORAGE_TEMPORARY_SYNCED,
        FaultPoint.STORAGE_RENAMED,
        FaultPoint.STORAGE_LINKED,
    },
    key=lambda point: point.value,
)
"""Passed by a script that is started afresh."""
RESTORE_POINTS = (
    FaultPoint.RESTORE_STARTED,
    FaultPoint.RESTORE_MODEL,
    FaultPoint.RESTORE_DONE,
)


@pytest.fixture(scope="session")
def complete(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last state of a script that nothing happened to."""
    run = tmp_path_factory.mktemp("loop") / "run"
    ended = server.run("loop", run)
    assert ended.status == 0, ended.log
    assert {point.value for point in POINTS} <= ended.hits.keys()
    return last_state(run)


@pytest.mark.parametrize("hit", [1, 4])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.value)
def test_killed_at_a_point(
    server: ForkServer, complete: dict[str, Any], tmp_path: Path, point: FaultPoint, hit: int
) -> None:
    run = tmp_path / "run"
    ended = server.run("loop", run, plan=[{"point": point.value, "hit": hit}])
    assert hit > 1 or ended.status == KILLED, ended.log
    finish(server, run)
    assert_complete(run, complete)


@pytest.mark.parametrize("point", [*POINTS, *RESTORE_POINTS], ids=lambda point: point.value)
def test_killed_twice_while_it_goes_on(
    server: ForkServer, complete: dict[str, Any], tmp_path: Path, point: FaultPoint
) -> None:
    run = tmp_path / "run"
    first = {"point": FaultPoint.CHECKPOINT_LOGGED.value, "hit": 2}
    assert server.run("loop", run, plan=[first]).status == KILLED
    for _ in range(2):
        ended = server.run("loop", run, plan=[{"point": point.value}])
        assert ended.status == KILLED or point not in RESTORE_POINTS
        assert_whole(run)
    finish(server, run)
    assert_complete(run, complete)


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments(
    server: ForkServer, complete: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    kill_at_random(server, complete, tmp_path, seed=seed, kills=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 164))
def test_soak_of_random_kills(
    server: ForkServer, complete: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    kill_at_random(server, complete, tmp_path, seed=seed, kills=8)


def test_a_script_that_was_stopped_and_taken_over_changes_nothing_when_it_wakes(
    server: ForkServer, complete: dict[str, Any], tmp_path: Path
) -> None:
    """SIGSTOP between the check and the rename of a manifest; another finishes; then SIGCONT."""
    for point in (FaultPoint.MANIFEST_WRITTEN, FaultPoint.CHECKPOINT_LOGGED):
        run = tmp_path / point.value
        ended = server.run(
            "loop",
            run,
            plan=[{"point": point.value, "hit": 3, "action": "stop"}],
            when_stopped=command("loop", run, take_over=True),
        )
        assert ended.when_stopped is not None
        assert ended.when_stopped.status == 0, ended.when_stopped.log
        assert ended.status == FencedError.exit_code, ended.log
        assert_complete(run, complete)


def test_of_two_scripts_one_is_refused(
    server: ForkServer, complete: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = server.run_together([command("loop", run), command("loop", run)])
    assert sorted(e.status for e in ended) == [0, RunBusyError.exit_code], ended[0].log
    assert_complete(run, complete)


def kill_at_random(
    server: ForkServer, complete: dict[str, Any], runs: Path, *, seed: int, kills: int
) -> None:
    """Kill ``kills`` processes; what is committed never goes back, and the ends are equal."""
    rng = random.Random(seed)
    points = [point.value for point in FaultPoint]
    killed = 0
    while killed < kills:
        run = runs / f"after-{killed}"
        status, step = KILLED, 0
        while status == KILLED and killed < kills:
            if rng.random() < 0.6:
                options: dict[str, Any] = {"kill_after_s": rng.uniform(0.0, 0.8)}
            else:
                options = {"plan": [{"point": rng.choice(points), "hit": rng.randint(1, 9)}]}
            ended = server.run("loop", run, **options)
            status = ended.status
            assert status in (0, KILLED), ended.log
            killed += status == KILLED
            before, step = step, assert_whole(run)
            assert step >= before
        if status == KILLED:
            finish(server, run)
        assert_complete(run, complete)


def finish(server: ForkServer, run: Path) -> None:
    ended = server.run("loop", run)
    assert ended.status == 0, ended.log


def assert_whole(run: Path) -> int:
    """The newest committed checkpoint is whole, byte for byte; returns its step, 0 without one."""
    if not (run / "run.json").exists():
        return 0
    storage = PosixStorage(run)
    committed = log_of(run).checkpoints
    if not committed:
        return 0
    newest = committed[-1]
    report = verify(storage, newest.directory, manifest_digest=newest.manifest_digest)
    assert report.ok, report.reason
    return newest.step


def assert_complete(run: Path, complete: dict[str, Any]) -> None:
    assert not list(run.rglob(".tmp-*"))
    assert audit_run(run).ok, "\n".join(audit_run(run).summary_lines())
    found = last_state(run)
    assert tree.differences(complete, found) == []
    assert tree.differences(found, complete) == []


def last_state(run: Path) -> dict[str, Any]:
    """Everything in the last checkpoint, by component."""
    storage = PosixStorage(run)
    newest = log_of(run).checkpoints[-1]
    assert newest.step == STEPS
    report = verify(storage, newest.directory, manifest_digest=newest.manifest_digest)
    assert report.ok, report.reason
    assert report.manifest is not None
    reader = CheckpointReader(storage, report.manifest)
    rows = [segment.view("draw", 0, segment.rows).copy() for segment in reader.segments("ring")]
    return {
        "values": reader.values(),
        "tensors": {name: reader.tensors(name) for name in report.manifest.components},
        "rows": [float(draw) for segment in rows for draw in segment][-200:],
    }


def log_of(run: Path) -> ExperienceState:
    state, _ = read_experience(PosixStorage(run))
    return state
