from __future__ import annotations

import math

import pytest
import torch

from perdure.algorithms.advantages import (
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    whiten,
)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_group_advantages_are_standard_scores_of_each_group() -> None:
    advantages = group_advantages(f64(1, 0, 0, 1, 2, 5), [4, 2])
    std = math.sqrt(4 * 0.25 / 3)
    assert advantages[:4].tolist() == pytest.approx(
        [0.5 / std, -0.5 / std] * 1 + [-0.5 / std, 0.5 / std], rel=1e-5
    )
    assert advantages[4:].tolist() == pytest.approx(
        [-1.5 / math.sqrt(4.5), 1.5 / math.sqrt(4.5)], rel=1e-5
    )


def test_group_advantages_without_division_are_centred_rewards() -> None:
    assert group_advantages(f64(1, 0, 0, 0), [4], normalise=False).tolist() == [
        0.75,
        -0.25,
        -0.25,
        -0.25,
    ]


@pytest.mark.parametrize("normalise", [True, False])
def test_equal_rewards_say_exactly_nothing(normalise: bool) -> None:
    rewards = torch.full((6,), 0.1)
    assert group_advantages(rewards, [3, 2, 1], normalise=normalise).tolist() == [0.0] * 6


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.5, 0.25]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert leave_one_out_advantages(f64(*rewards), [4]).tolist() == pytest.approx(expected)
    assert leave_one_out_advantages(f64(3.0), [1]).tolist() == [0.0]


def test_gae_by_hand() -> None:
    # δ = (1 + 0.9·2 - 1, 0 + 0.9·3 - 2, 4 - 3) = (1.8, 0.7, 1); γλ = 0.45
    # A = (1.8 + 0.45·1.15, 0.7 + 0.45·1, 1)
    advantages, returns = generalized_advantages(
        f64(1, 0, 4)[None], f64(1, 2, 3)[None], torch.ones(1, 3), gamma=0.9, lam=0.5
    )
    assert advantages[0].tolist() == pytest.approx([2.3175, 1.15, 1.0])
    assert returns[0].tolist() == pytest.approx([3.3175, 3.15, 4.0])


def test_gae_with_lambda_one_is_the_discounted_return_minus_value() -> None:
    rewards, values = torch.rand(4, 7, dtype=torch.float64), torch.rand(4, 7, dtype=torch.float64)
    advantages, returns = generalized_advantages(
        rewards, values, torch.ones(4, 7), gamma=0.9, lam=1.0
    )
    expected = torch.stack(
        [
            (rewards[:, t:] * 0.9 ** torch.arange(7 - t, dtype=torch.float64)).sum(1)
            for t in range(7)
        ],
        dim=1,
    )
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, expected - values)


def test_gae_with_lambda_zero_is_the_one_step_error() -> None:
    rewards, values = f64(1, 2, 3)[None], f64(5, 6, 7)[None]
    advantages, _ = generalized_advantages(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.0)
    assert advantages[0].tolist() == pytest.approx([1 + 3 - 5, 2 + 3.5 - 6, 3 - 7])


def test_gae_does_not_see_tokens_that_the_policy_did_not_choose() -> None:
    plain, plain_returns = generalized_advantages(
        f64(1, 0, 4)[None], f64(1, 2, 3)[None], torch.ones(1, 3), gamma=0.9, lam=0.5
    )
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0]])
    spread, spread_returns = generalized_advantages(
        f64(9, 1, 9, 9, 0, 4, 9)[None],
        f64(8, 1, 8, 8, 2, 3, 8)[None],
        mask,
        gamma=0.9,
        lam=0.5,
    )
    assert torch.equal(spread[mask.bool()], plain[0])
    assert torch.equal(spread_returns[mask.bool()], plain_returns[0])
    assert not spread[~mask.bool()].any()
    assert not spread_returns[~mask.bool()].any()


def test_whiten() -> None:
    assert whiten(f64(1, 3)).tolist() == pytest.approx([-1, 1], rel=1e-5)
    assert whiten(torch.full((3,), 2.5)).tolist() == [0.0, 0.0, 0.0]
    assert whiten(f64(7.0)).tolist() == [0.0]
