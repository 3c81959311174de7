"""SIGKILL of controllers and engines at random fault points of the asynchronous modes.

Which sessions end up in which batch depends on timing there, so no two runs are equal. What has to
hold: nothing that was durable when a process died is missing afterwards, the audit proves the run,
and who trains the logged batches in their order gets the weights of every step, bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drill_tools import KILLED, ForkServer, next_action, run_to_end
from logged_batches import Acknowledged
from retraining import retrained

from perdure.audit import audit_run
from perdure.experience import read_experience
from perdure.storage import PosixStorage

MODES = ("colocate_async", "separate_async")
POINTS = {
    "log_control_written": 40,
    "log_fsynced": 40,
    "log_acknowledged": 40,
    "log_payload_written": 5,
    "log_payload_fsynced": 5,
    "log_segment_opened": 3,
    "checkpoint_staged": 4,
    "checkpoint_files_durable": 4,
    "manifest_renamed": 4,
    "checkpoint_logged": 4,
    "collect_logged": 2,
    "groups_submitted": 5,
    "session_finished": 96,
    "batch_taken": 12,
    "local_update_done": 12,
    "step_done": 6,
    "weights_published": 7,
    "restore_done": 1,
    "redo_step": 1,
    "redo_done": 1,
}
"""And about how often a run that nothing happens to passes them; a recovery, the last ones."""
BUSY = ("session_finished", "log_acknowledged", "batch_taken", "weights_published")
"""Where engines are killed."""


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
                plan=[strike(rng, tuple(POINTS))],
                kill_engines=engines,
                overrides=overrides(mode, seed),
            )
            status = ended.status
            assert status in (0, KILLED), ended.log
            killed += status == KILLED
            if (run / "log").exists():
                state, _ = read_experience(PosixStorage(run))
                state.check()
                durable.check(state)
                durable.note(state)
        if status == KILLED:
            run_to_end(server, run, overrides=overrides(mode, seed))
        prove(run, durable)


def strike(rng: random.Random, points: tuple[str, ...]) -> dict[str, object]:
    point = rng.choice(points)
    return {"point": point, "hit": rng.randint(1, POINTS[point])}


def overrides(mode: str, seed: int) -> tuple[str, ...]:
    warmup, drop = seed % 4, seed % 2 == 0
    return (
        f"mode={mode}",
        "learner.supervised.steps=0",
        "learner.entropy_coef=0.01",
        "rollout.partial_tokens=2",
        f"trainer.local_updates_per_step={(1, 2, 4)[seed % 3]}",
        f"sampler.age_policy={'drop' if drop else 'wait'}",
        f"sampler.max_prompt_age={seed % 3 + 1 + drop * warmup}",
        f"sampler.num_warmup_batches={warmup}",
    )


def prove(run: Path, durable: Acknowledged) -> None:
    """Nothing durable is missing, the audit finds nothing, and the batches give the weights."""
    state, _ = read_experience(PosixStorage(run))
    durable.check(state)
    assert state.last_step == 6
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())
    assert retrained(run) == {step: done.digest for step, done in state.step_done.items()}
