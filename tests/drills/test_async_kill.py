"""SIGKILL of controllers and engines at random fault points of the asynchronous modes.

Which sessions end up in which batch depends on timing there, so no two runs are equal. What has to
hold: nothing that was durable when a process died is missing afterwards, the audit proves the run,
and who trains the logged batches in their order gets the weights of every step, bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from async_cases import BUSY, MODES, POINTS, note_durable, overrides, prove, strike
from drill_tools import KILLED, ForkServer, next_action, run_to_end
from logged_batches import Acknowledged


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_points(server: ForkServer, tmp_path: Path, mode: str, seed: int) -> None:
    kill_again_and_again(server, tmp_path, mode, seed=seed, kills=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1020))
@pytest.mark.parametrize("mode", MODES)
def test_soak_of_kills(server: ForkServer, tmp_path: Path, mode: str, seed: int) -> None:
    kill_again_and_again(server, tmp_path, mode, seed=seed, kills=5)


def kill_again_and_again(
    server: ForkServer, runs: Path, mode: str, *, seed: int, kills: int
) -> None:
    """Kill ``kills`` controllers; a run that ends in between is proven and followed by another.

    Every second controller loses an engine process before, where there are any.
    """
    rng = random.Random(f"{mode} {seed}")
    killed, number = 0, 0
    while killed < kills:
        number += 1
        run, durable = runs / f"run-{number}", Acknowledged()
        status = KILLED
        while status == KILLED and killed < kills:
            engines = [strike(rng, BUSY)] if mode == "separate_async" and rng.random() < 0.5 else []
            ended = server.run(
                next_action(run),
                run,
                plan=[strike(rng, list(POINTS))],
                kill_engines=engines,
                overrides=overrides(mode, seed),
            )
            status = ended.status
            assert status in (0, KILLED), ended.log
            killed += status == KILLED
            note_durable(run, durable)
        if status == KILLED:
            run_to_end(server, run, overrides=overrides(mode, seed))
        prove(run, durable)
