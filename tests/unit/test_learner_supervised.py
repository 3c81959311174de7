from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from learner_cases import VOCAB, make_model, restore, save

from perdure.config import Problem
from perdure.core.errors import TrainingError
from perdure.learner.config import LearnerConfig
from perdure.learner.local import LearnerSetup, LocalLearner

EXAMPLES = [((1, 2), (3, 4, 5)), ((2,), (6,)), ((7, 1, 1), (0, 2))]
FAST: dict[str, Any] = {"supervised": {"steps": 40, "lr": 0.02, "batch_size": 3}}


def make(settings: dict[str, Any], *, poisoned: bool = False) -> LocalLearner:
    model = make_model()
    if poisoned:
        with torch.no_grad():
            model.norm.weight[0] = float("nan")
    return LocalLearner(
        model,
        config=LearnerConfig.model_validate(settings),
        setup=LearnerSetup(seed=0, total_local_updates=10, deterministic=True),
    )


def test_answers_are_learned() -> None:
    learner = make(FAST)
    metrics = [learner.supervised_step(step, EXAMPLES) for step in range(1, 41)]
    assert metrics[0]["loss"] == pytest.approx(math.log(VOCAB), abs=1.0)
    assert metrics[-1]["loss"] < 0.1
    assert metrics[-1]["token_accuracy"] == 1.0


def test_the_rate_follows_the_warm_starts_own_schedule() -> None:
    schedule = {"kind": "linear", "warmup_updates": 2}
    learner = make({"lr": 9.0, "supervised": {"steps": 4, "lr": 0.1, "schedule": schedule}})
    rates = [learner.supervised_step(step, EXAMPLES)["lr"] for step in range(1, 5)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])


def test_a_step_repeated_after_a_restore_gives_the_same_bits() -> None:
    learner = make(FAST)
    for step in (1, 2):
        learner.supervised_step(step, EXAMPLES)
    saved = save(learner)
    first = learner.supervised_step(3, EXAMPLES[:2])
    digest = learner.state_digest()
    other = make(FAST)
    restore(other, saved)
    assert other.supervised_step(3, EXAMPLES[:2]) == first
    assert other.state_digest() == digest


def test_what_is_not_finite_changes_nothing() -> None:
    learner = make(FAST, poisoned=True)
    before = learner.policy_digest()
    with pytest.raises(TrainingError, match="supervised step 7: loss is not finite"):
        learner.supervised_step(7, EXAMPLES)
    assert learner.policy_digest() == before


def test_nothing_to_learn_is_an_error() -> None:
    with pytest.raises(TrainingError, match="supervised step 1: no token that the policy chose"):
        make(FAST).supervised_step(1, [((1, 2), ())])


def test_the_optimizer_starts_afresh_after_the_warm_start() -> None:
    learner = make(FAST)
    learner.supervised_step(1, EXAMPLES)
    warm = learner.components()["optimizer"].state().tensors
    assert any(tensor.any() for tensor in warm.values())
    learner.begin_training()
    assert not any(tensor.any() for tensor in warm.values())
    with pytest.raises(AssertionError):
        learner.supervised_step(2, EXAMPLES)


def test_a_warm_up_longer_than_the_warm_start_is_a_problem() -> None:
    config = LearnerConfig.model_validate(
        {"supervised": {"steps": 5, "schedule": {"warmup_updates": 5}}}
    )
    (problem,) = config.problems()
    assert isinstance(problem, Problem)
    assert problem.field == "supervised.schedule.warmup_updates"


def test_what_a_tool_says_is_read_and_not_imitated() -> None:
    prompt, answer = (1, 2), (3, 4, 5, 6)
    full, masked = (make(FAST) for _ in range(2))
    loss = [
        learner.supervised_step(1, [example])["loss"]
        for learner, example in (
            (full, (prompt, answer, (0, 0, 1, 1))),
            (masked, ((*prompt, 3, 4), (5, 6))),
        )
    ]
    assert loss[0] == loss[1]
    assert full.policy_digest() == masked.policy_digest()
