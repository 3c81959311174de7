"""Every trainer mode on every runtime: one recipe, the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill_tools import RECIPE, Events, assert_same_training
from ray_cluster import QUIET
from retraining import retrained

from perdure.audit import audit_run
from perdure.config import load_config
from perdure.experience import read_experience
from perdure.storage import PosixStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("ray"), *QUIET]
MODES = ("sync", "colocate_async", "separate_async")


def train(run: Path, *overrides: str) -> Events:
    events = Events()
    unsupervised = ("learner.supervised.steps=0", "learner.entropy_coef=0.01")
    config = load_config(RunConfig, RECIPE, [*unsupervised, *overrides])
    launch.train(config, run, display=events)
    return events


@pytest.fixture(params=("local", "ray"))
def runtime(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if request.param == "local":
        return ("runtime=local",)
    return ("runtime=ray", f"ray.address={request.getfixturevalue('ray_address')}")


@pytest.mark.parametrize("mode", MODES)
def test_the_logged_batches_give_the_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, runtime: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    events = train(run, f"mode={mode}", *runtime)
    state, _ = read_experience(PosixStorage(run))
    assert state.last_step == 6
    assert len(events.of("published")) == 7
    assert not events.of("engine_lost")
    assert "died" not in "".join(capfd.readouterr()), "an orderly end alarms nobody"
    report = audit_run(run)
    assert report.ok, report.summary_lines()
    assert retrained(run) == {step: done.digest for step, done in state.step_done.items()}


def test_a_synchronous_run_is_the_same_on_both(tmp_path: Path, ray_address: str) -> None:
    train(tmp_path / "local")
    train(tmp_path / "ray", "runtime=ray", f"ray.address={ray_address}", "rollout.engines=2")
    assert_same_training(tmp_path / "ray", tmp_path / "local")
