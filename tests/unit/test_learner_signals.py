from __future__ import annotations

from typing import Any

import pytest
import torch
from learner_cases import trajectory

from perdure.core.trajectories import RewardedGroup
from perdure.learner.batch import UpdateBatch
from perdure.learner.config import LearnerConfig
from perdure.learner.signals import Signals, set_advantages
from perdure.learner.witness import NO_TRUNCATION, Witness

GROUP = RewardedGroup(
    0,
    (trajectory(0, 0, [1], [2, 3, 4, 5], mask=[1, 0, 1, 0]), trajectory(0, 1, [1, 2], [6])),
    (2.0, 1.0),
)
"""Three chosen tokens: two of the first answer, one of the second."""
OLD, REFERENCE = [-1.0, -2.0, -3.0], [-1.5, -2.5, -3.0]
PENALTY = {"kl": {"coef": 0.1, "estimator": "k1", "placement": "reward"}}


def signals_of(
    settings: dict[str, Any], *, values: list[float] | None = None, reference: bool = False
) -> Signals:
    batch = UpdateBatch.build([GROUP], torch.device("cpu"))
    signals = Signals(
        old_logprobs_M=torch.tensor(OLD),
        old_is_current=False,
        witness=Witness(3, NO_TRUNCATION, torch.device("cpu")),
        reference_M=torch.tensor(REFERENCE) if reference else None,
        values_M=None if values is None else torch.tensor(values),
        advantages_M=torch.zeros(3),
        returns_M=torch.zeros(3),
    )
    set_advantages(LearnerConfig.model_validate(settings), batch, signals)
    return signals


def test_a_group_advantage_holds_for_every_chosen_token() -> None:
    signals = signals_of({"algorithm": "grpo", "normalise_advantages": False})
    assert signals.advantages_M.tolist() == [0.5, 0.5, -0.5]
    assert signals_of({"algorithm": "rloo"}).advantages_M.tolist() == [1.0, 1.0, -1.0]


def test_a_penalty_in_the_reward_comes_off_the_answers_score() -> None:
    signals = signals_of(
        {"algorithm": "grpo", "normalise_advantages": False, **PENALTY}, reference=True
    )
    # Scores 2 - 0.1 · (0.5 + 0.5) and 1 - 0.1 · 0.
    assert signals.advantages_M.tolist() == pytest.approx([0.45, 0.45, -0.45])


def test_a_penalty_in_the_loss_leaves_the_reward_alone() -> None:
    settings = {"algorithm": "rloo", "kl": {"coef": 0.1, "placement": "loss"}}
    assert signals_of(settings, reference=True).advantages_M.tolist() == [1.0, 1.0, -1.0]


def test_the_reward_comes_with_the_last_chosen_token() -> None:
    signals = signals_of(
        {"algorithm": "ppo", "normalise_advantages": False, "gamma": 0.5, "lam": 0.5},
        values=[1.0, 3.0, 0.5],
    )
    # δ = (0 + 0.5·3 - 1, 2 - 3) = (0.5, -1); A = (0.5 + 0.25·(-1), -1) and 1 - 0.5.
    assert signals.advantages_M.tolist() == pytest.approx([0.25, -1.0, 0.5])
    assert signals.returns_M.tolist() == pytest.approx([1.25, 2.0, 1.0])


def test_a_penalty_in_the_reward_comes_off_at_its_token() -> None:
    signals = signals_of(
        {"algorithm": "reinforce++", "normalise_advantages": False, "gamma": 0.5, **PENALTY},
        reference=True,
    )
    assert signals.advantages_M.tolist() == pytest.approx([-0.05 + 0.5 * 1.95, 1.95, 1.0])


@pytest.mark.parametrize("algorithm", ["reinforce++", "ppo"])
def test_advantages_are_whitened_over_the_batch_and_returns_are_not(algorithm: str) -> None:
    values = [0.0, 0.0, 0.0] if algorithm == "ppo" else None
    signals = signals_of({"algorithm": algorithm}, values=values)
    assert signals.returns_M.tolist() == [2.0, 2.0, 1.0]
    assert signals.advantages_M.mean().item() == pytest.approx(0, abs=1e-6)
    assert signals.advantages_M.std(correction=0).item() == pytest.approx(1, rel=1e-4)
