from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    VOCAB,
    make_learner,
    make_model,
    random_groups,
    restore,
    save,
    trajectory,
    update_id,
)

from perdure.core.errors import ConfigError, TrainingError
from perdure.core.ids import PolicyVersion
from perdure.core.trajectories import RewardedGroup, Trajectory
from perdure.learner.config import LearnerConfig
from perdure.learner.local import LearnerSetup, LocalLearner
from perdure.models import Transformer, weights_of

PPO = {"algorithm": "ppo", "ppo_epochs": 2, "mini_batches": 3, "lr": 1e-3}
SETTINGS: list[dict[str, Any]] = [
    {"algorithm": "grpo"},
    {"algorithm": "rloo", "mini_batches": 2, "entropy_coef": 0.01},
    {"algorithm": "reinforce++", "kl": {"coef": 0.1, "estimator": "k1", "placement": "reward"}},
    {"algorithm": "grpo", "kl": {"coef": 0.1}, "loss_aggregation": "seq-mean-token-mean"},
    {**PPO, "kl": {"coef": 0.1, "estimator": "k2"}, "value": {"clip": None}},
    {**PPO, "kl": {"coef": 0.1, "placement": "reward"}, "gamma": 0.9, "lam": 0.8},
]


def logprobs_alone(model: Transformer, one: Trajectory) -> torch.Tensor:
    tokens = torch.from_numpy(np.concatenate([one.prompt_ids_P, one.response_ids_T])).long()
    start = len(one.prompt_ids_P)
    logprobs = torch.log_softmax(model.logits(model(tokens[None]))[0], -1)
    return logprobs[start - 1 : -1].gather(1, tokens[start:, None]).squeeze(1)


@pytest.mark.parametrize("flat", [0, 2])
def test_one_grpo_update_equals_a_hand_written_one(flat: int) -> None:
    """The first ``flat`` groups have equal rewards: they count in the mean and move nothing."""
    groups, model = random_groups(masked=True), make_model()
    groups[:flat] = [RewardedGroup(g.group, g.trajectories, (1.0,) * 4) for g in groups[:flat]]
    loss, tokens = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor(group.rewards)
        scores = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for one, score in zip(group.trajectories, scores.nan_to_num(), strict=True):
            chosen = logprobs_alone(model, one)[torch.from_numpy(one.loss_mask_T).bool()]
            loss = loss - (score * (chosen - chosen.detach()).exp()).sum()
            tokens += len(chosen)
    (loss / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()

    learner = make_learner({"lr": 1e-3, "adam": {"max_grad_norm": 0.01}})
    result = learner.local_update(update_id(1), groups)

    torch.testing.assert_close(
        dict(learner.policy_weights()), weights_of(model), rtol=1e-4, atol=1e-5
    )
    assert result.metrics["policy_loss"] == pytest.approx((loss / tokens).item(), abs=1e-5)
    assert result.metrics["policy_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert result.skipped == ()


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_runs_are_equal_bit_for_bit(settings: dict[str, Any]) -> None:
    digests, metrics = [], []
    for _ in range(2):
        learner = make_learner(settings)
        metrics.append(
            [learner.local_update(update_id(s), random_groups(seed=s)).metrics for s in (1, 2)]
        )
        digests.append(learner.state_digest())
    assert digests[0] == digests[1]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_update_repeated_after_a_restore_gives_the_same_bits(settings: dict[str, Any]) -> None:
    learner = make_learner(settings)
    learner.local_update(update_id(1), random_groups(seed=1))
    saved = save(learner)
    first = [learner.local_update(update_id(s), random_groups(seed=s)) for s in (2, 3)]
    digest = learner.state_digest()

    other = make_learner(settings, model=make_model(seed=99))
    other.local_update(update_id(9), random_groups(seed=9))
    for again in (learner, other):
        restore(again, saved)
        assert [again.local_update(update_id(s), random_groups(seed=s)) for s in (2, 3)] == first
        assert again.state_digest() == digest


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_loss_does_not_depend_on_micro_batches(settings: dict[str, Any]) -> None:
    found = []
    for limit in (1, 64, 100_000):
        learner = make_learner({**settings, "micro_batch_tokens": limit})
        metrics = learner.local_update(update_id(1), random_groups(masked=True)).metrics
        found.append((metrics, dict(learner.policy_weights())))
    for metrics, weights in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-4, abs=1e-5)
        torch.testing.assert_close(weights, found[0][1], rtol=1e-3, atol=1e-5)


def test_the_shuffle_is_keyed_by_the_update() -> None:
    digests = set()
    for update in (update_id(1), update_id(2), update_id(1, 1)):
        learner = make_learner(PPO)
        learner.local_update(update, random_groups())
        digests.add(learner.policy_digest())
    assert len(digests) == 3


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++", "ppo"])
def test_a_rewarded_answer_becomes_likely(algorithm: str) -> None:
    """A bandit: of eight answers only token 5 is rewarded."""
    model = make_model()
    learner = make_learner(
        {"algorithm": algorithm, "lr": 0.02, "value": {"lr": 0.02}, "ppo_epochs": 2},
        updates=12,
        model=model,
    )
    probe = trajectory(0, 0, [1], [5])
    draws = np.random.default_rng(3)
    for step in range(1, 13):
        with torch.no_grad():
            chances = torch.softmax(model.logits(model(torch.tensor([[1]])))[0, 0], -1).double()
        answers = draws.choice(VOCAB, size=32, p=(chances / chances.sum()).numpy())
        group = RewardedGroup(
            step,
            tuple(trajectory(step, i, [1], [int(answer)]) for i, answer in enumerate(answers)),
            tuple(float(answer == 5) for answer in answers),
        )
        learner.local_update(update_id(step), [group])
    with torch.no_grad():
        assert logprobs_alone(model, probe).exp().item() > 0.8


def test_groups_without_signal_leave_the_policy_alone() -> None:
    groups = [RewardedGroup(g.group, g.trajectories, (0.3,) * 4) for g in random_groups()]
    learner = make_learner()
    before = learner.policy_digest()
    metrics = learner.local_update(update_id(1), groups).metrics
    assert learner.policy_digest() == before
    assert metrics["policy_grad_norm"] == 0


def test_moments_decay_when_nothing_moves() -> None:
    groups = [RewardedGroup(g.group, g.trajectories, (0.3,) * 4) for g in random_groups()]
    learner = make_learner()
    learner.local_update(update_id(1), random_groups())
    optimizer = learner.components()["optimizer"].state().tensors
    mean = optimizer["norm.weight/exp_avg"].clone()
    learner.local_update(update_id(2), groups)
    torch.testing.assert_close(optimizer["norm.weight/exp_avg"], 0.9 * mean)
    assert optimizer["norm.weight/step"] == 2


def test_old_probabilities_are_those_before_the_update() -> None:
    """One pass: the ratio is 1. Several: it starts at 1 and moves."""
    single = make_learner({"lr": 1e-2}).local_update(update_id(1), random_groups()).metrics
    assert single["approx_kl"] == 0
    assert single["clip_fraction"] == 0
    several = make_learner({"lr": 1e-2, "ppo_epochs": 3}).local_update(
        update_id(1), random_groups()
    )
    assert several.metrics["approx_kl"] > 1e-4
    assert several.metrics["clip_fraction"] > 0


@pytest.mark.parametrize("settings", [{}, {"mini_batches": 2}])
def test_mismatch_is_the_distance_to_the_engine(settings: dict[str, Any]) -> None:
    group = RewardedGroup(0, (trajectory(0, 0, [1], [2, 3]), trajectory(0, 1, [1], [4])), (0, 1))
    model, logged = make_model(), -math.log(VOCAB)
    learner = make_learner(settings, model=model)
    with torch.no_grad():
        distance = torch.cat([logprobs_alone(model, one) - logged for one in group.trajectories])
    metrics = learner.local_update(update_id(1), [group], version=PolicyVersion(1)).metrics
    assert metrics["mismatch_tokens"] == 3
    assert "off_policy_tokens" not in metrics
    assert metrics["mismatch_mean"] == pytest.approx(distance.abs().mean().item(), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(distance.abs().max().item(), rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(
        (distance.exp() - 1 - distance).mean().item(), rel=1e-3
    )
    assert metrics["mismatch_k1"] == pytest.approx(-distance.mean().item(), rel=1e-4)


def test_reference_is_frozen_when_training_begins() -> None:
    learner = make_learner({"kl": {"coef": 0.1}, "lr": 1e-2})
    start = learner.policy_digest()
    assert learner.reference_digest() == start
    first = learner.local_update(update_id(1), random_groups()).metrics
    second = learner.local_update(update_id(2), random_groups()).metrics
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] > 1e-4
    assert learner.reference_digest() == start != learner.policy_digest()
    learner.freeze_reference()
    assert learner.reference_digest() == learner.policy_digest()


def test_the_penalty_holds_the_policy_back() -> None:
    found = {}
    for coef in (1e-6, 5.0):
        learner = make_learner({"kl": {"coef": coef, "estimator": "k2"}, "lr": 1e-2})
        for step in range(1, 8):
            metrics = learner.local_update(update_id(step), random_groups()).metrics
        found[coef] = metrics["kl"]
    assert found[5.0] < found[1e-6] / 2


def test_temperature_is_part_of_the_policy() -> None:
    entropies = [
        make_learner(temperature=t).local_update(update_id(1), random_groups()).metrics["entropy"]
        for t in (0.5, 1.0, 10.0)
    ]
    assert entropies == sorted(entropies)
    assert entropies[2] == pytest.approx(math.log(VOCAB), abs=1e-2)


def test_learning_rate_horizon_counts_local_updates() -> None:
    learner = make_learner(
        {"lr": 0.1, "schedule": {"kind": "linear"}, "ppo_epochs": 2, "mini_batches": 2}, updates=4
    )
    rates = [
        learner.local_update(update_id(1 + i // 2, i % 2), random_groups()).metrics["lr"]
        for i in range(4)
    ]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert learner.local_updates == 4
    assert learner.optimizer_step == 16


def poisoned_model() -> Transformer:
    model = make_model()
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    return model


@pytest.mark.parametrize("settings", [{"mini_batches": 2}, {}])
def test_a_mini_batch_that_is_not_finite_is_left_out_and_listed(settings: dict[str, Any]) -> None:
    learner = make_learner(settings, model=poisoned_model())
    before = {k: v.clone() for k, v in learner.components()["optimizer"].state().tensors.items()}
    digest = learner.policy_digest()
    result = learner.local_update(update_id(1, 3), random_groups())
    assert result.skipped == tuple(
        f"3/0/{index} policy: loss is not finite"
        for index in range(settings.get("mini_batches", 1))
    )
    assert learner.policy_digest() == digest
    after = learner.components()["optimizer"].state().tensors
    torch.testing.assert_close(dict(after), before, rtol=0, atol=0)
    assert learner.optimizer_step == 0
    assert learner.local_updates == 1
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_only_the_bad_mini_batch_is_left_out() -> None:
    """One logged answer whose advantage overflows spoils its own mini-batch alone."""
    groups = random_groups(groups=4, sessions=2)
    first = RewardedGroup(0, groups[0].trajectories, (3e38, -3e38))
    result = make_learner(
        {"mini_batches": 4, "normalise_advantages": False, "clip_high": 1e9}
    ).local_update(update_id(1), [first, *groups[1:]])
    assert 1 <= len(result.skipped) <= 2
    assert "policy_loss" in result.metrics


def test_an_infinite_gradient_changes_nothing() -> None:
    learner = make_learner({"normalise_advantages": False})
    groups = random_groups()
    huge = RewardedGroup(0, groups[0].trajectories, (3e37, 0.0, 0.0, 3e37))
    before = learner.policy_digest()
    result = learner.local_update(update_id(1), [huge])
    assert result.skipped == ("0/0/0 policy: gradient is not finite",)
    assert learner.policy_digest() == before


def test_raise_stops_with_a_clear_sentence() -> None:
    learner = make_learner({"nonfinite": "raise"}, model=poisoned_model())
    with pytest.raises(TrainingError, match="policy mini-batch 0/0/0: loss is not finite"):
        learner.local_update(update_id(1), random_groups())


def test_the_critic_learns_the_returns() -> None:
    learner = make_learner({"algorithm": "ppo", "value": {"lr": 0.01, "clip": None}}, updates=40)
    groups = [RewardedGroup(g.group, g.trajectories, (2.0,) * 4) for g in random_groups()]
    metrics = [learner.local_update(update_id(s), groups).metrics for s in range(1, 31)]
    assert metrics[0]["value_loss"] == pytest.approx(2.0)
    assert metrics[-1]["value_loss"] < 0.02
    assert metrics[-1]["value_mean"] == pytest.approx(2.0, abs=0.2)


def test_training_begins_anew() -> None:
    learner = make_learner({"algorithm": "ppo"})
    fresh = learner.components()
    blank = save(learner)
    learner.local_update(update_id(1), random_groups())
    policy = learner.policy_digest()
    learner.begin_training()
    assert learner.policy_digest() == policy
    assert (learner.optimizer_step, learner.local_updates) == (0, 0)
    for name in ("optimizer", "value_optimizer"):
        state = fresh[name].state().tensors
        assert all(not tensor.any() for tensor in state.values())
    trunk = {k: v for k, v in fresh["value"].state().tensors.items() if k.startswith("trunk.")}
    expected = {f"trunk.{k}": v for k, v in learner.policy_weights().items()}
    torch.testing.assert_close(trunk, expected, rtol=0, atol=0)
    assert fresh["counters"].state().values == blank["counters"][0].values


@pytest.mark.parametrize(
    ("settings", "temperature", "message"),
    [
        ({}, 0.0, "temperature is 0.0"),
        ({"schedule": {"warmup_updates": 11}}, 1.0, "warmup_updates is 11"),
    ],
)
def test_impossible_setups_are_refused(
    settings: dict[str, Any], temperature: float, message: str
) -> None:
    config = LearnerConfig.model_validate(settings)
    setup = LearnerSetup(seed=0, total_local_updates=10, temperature=temperature)
    with pytest.raises(ConfigError, match=message):
        LocalLearner(make_model(), config=config, setup=setup)


def test_deterministic_mode_leaves_torch_as_it_was() -> None:
    before = torch.get_deterministic_debug_mode()
    make_learner().local_update(update_id(1), random_groups())
    assert torch.get_deterministic_debug_mode() == before
