"""The order in which a global step ends (spec A2), read from the fault points a run passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drill_tools import RECIPE

from perdure.config import load_config
from perdure.core.faults import FaultPlan, FaultPoint
from perdure.experience import read_experience
from perdure.storage import PosixStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected

LETTERS = {
    FaultPoint.GROUPS_SUBMITTED: "s",
    FaultPoint.BATCH_TAKEN: "t",
    FaultPoint.LOCAL_UPDATE_DONE: "u",
    FaultPoint.STEP_DONE: "D",
    FaultPoint.CHECKPOINT_STAGED: "C",
    FaultPoint.WEIGHTS_PUBLISHED: "P",
    FaultPoint.EVALUATED: "E",
}


def test_a_step_ends_in_the_promised_order(tmp_path: Path) -> None:
    plan = FaultPlan()
    trace: list[str] = []
    plan.observers.append(lambda point: trace.append(LETTERS.get(point, "")))
    config = load_config(RunConfig, RECIPE, ["learner.supervised.steps=0"])
    launch.train(config, tmp_path / "run", injected=Injected(faults=plan))
    # Checkpoints and validation are due before training and after every second step.
    assert "".join(trace) == "CPE" + ("stutuDP" + "stutuDCPE") * 3


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_an_asynchronous_step_ends_in_the_same_order(tmp_path: Path, mode: str) -> None:
    plan = FaultPlan()
    trace: list[str] = []
    plan.observers.append(lambda point: trace.append(LETTERS.get(point, "")))
    config = load_config(RunConfig, RECIPE, ["learner.supervised.steps=0", f"mode={mode}"])
    launch.train(config, tmp_path / "run", injected=Injected(faults=plan))
    # One batch runs ahead, so nothing is left to submit in the last step.
    assert "".join(trace) == "CPE" + "stutuDPstutuDCPE" * 2 + "stutuDPtutuDCPE"


def test_versions_count_publications_and_clocks_stay_apart(tmp_path: Path) -> None:
    config = load_config(RunConfig, RECIPE, ["learner.lr=0.01"])
    launch.train(config, tmp_path / "run")
    state, _ = read_experience(PosixStorage(tmp_path / "run"))
    state.check()
    updates = config.trainer.local_updates_per_step
    assert len(state.taken) == config.trainer.total_steps * updates
    steps = [record.optimizer_step for record in state.step_done.values()]
    assert steps == sorted(steps)
    assert steps[-1] <= config.trainer.total_steps * updates * config.learner.mini_batches
    assert [record.version for record in state.published.values()] == list(
        range(1, len(state.published) + 1)
    )
    for record in state.published.values():
        if record.global_step > 0:
            assert record.digest == state.step_done[record.global_step].policy_digest


def test_an_on_policy_step_trains_on_tokens_of_the_weights_before_it(tmp_path: Path) -> None:
    config = load_config(RunConfig, RECIPE, ["learner.lr=0.01"])
    launch.train(config, tmp_path / "run")
    state, _ = read_experience(PosixStorage(tmp_path / "run"))
    digest_before = {0: next(iter(state.published.values())).digest}
    digest_before |= {step: record.policy_digest for step, record in state.step_done.items()}
    for group in state.groups.values():
        for done in group.done.values():
            assert done.batch.record.first_versions[done.row] == done.last_version
            held = state.published[done.last_version].digest
            assert held == digest_before[group.submitted.submitted_step - 1]


def test_curves_have_one_row_per_step(tmp_path: Path) -> None:
    launch.train(load_config(RunConfig, RECIPE), tmp_path / "run")
    rows = (tmp_path / "run/metrics/steps.jsonl").read_text().splitlines()
    steps = [int(re.findall(r'"global_step":(\d+)', row)[0]) for row in rows]
    assert steps == list(range(1, 7))
