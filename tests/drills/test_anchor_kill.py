"""SIGKILL inside a global step of four local updates that share one policy anchor.

The anchor is in no checkpoint: it is taken anew when the step is redone, and everything comes back
bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drill_tools import ANCHORED, KILLED, ForkServer, assert_same_training, next_action, run_to_end

OVERRIDES = (*ANCHORED, "learner.importance.level=sequence")
TRAINING = ("batch_taken", "local_update_done")
"""Points between the local updates of a step."""


@pytest.fixture(scope="module")
def anchored(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run that nothing happened to."""
    run = tmp_path_factory.mktemp("anchored") / "run"
    ended = server.run("train", run, overrides=OVERRIDES)
    assert ended.status == 0, ended.log
    return run


@pytest.mark.parametrize("hit", [13, 14, 15, 16])
@pytest.mark.parametrize("point", TRAINING)
def test_killed_between_the_local_updates_of_a_step(
    server: ForkServer, anchored: Path, tmp_path: Path, point: str, hit: int
) -> None:
    """In the fourth step; the last checkpoint lies behind the second."""
    run = tmp_path / "run"
    ended = server.run("train", run, plan=[{"point": point, "hit": hit}], overrides=OVERRIDES)
    assert ended.status == KILLED, ended.log
    run_to_end(server, run)
    assert_same_training(run, anchored)


@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again(
    server: ForkServer, anchored: Path, tmp_path: Path, seed: int
) -> None:
    kill_inside_steps(server, anchored, tmp_path, seed=seed, kills=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_soak_of_kills_inside_steps(
    server: ForkServer, anchored: Path, tmp_path: Path, seed: int
) -> None:
    kill_inside_steps(server, anchored, tmp_path, seed=seed, kills=5)


def kill_inside_steps(
    server: ForkServer, anchored: Path, runs: Path, *, seed: int, kills: int
) -> None:
    """Kill up to ``kills`` processes of one run inside steps, also while they redo one."""
    rng = random.Random(seed)
    run = runs / "run"
    killed = 0
    while killed < kills:
        points = (*TRAINING, "redo_step") if killed else TRAINING
        plan = [{"point": rng.choice(points), "hit": rng.randint(1, 8)}]
        ended = server.run(next_action(run), run, plan=plan, overrides=OVERRIDES)
        assert ended.status in (0, KILLED), ended.log
        if ended.status == 0:
            break
        killed += 1
    assert killed
    run_to_end(server, run, overrides=OVERRIDES)
    assert_same_training(run, anchored)
