from __future__ import annotations

import math

import pytest
import torch

from perdure.algorithms.divergences import KL_ESTIMATORS, kl_estimate
from perdure.algorithms.losses import (
    AGGREGATIONS,
    clipped_surrogate,
    clipped_value_loss,
    entropy,
    token_weights,
)
from perdure.algorithms.names import Aggregation, KlEstimator


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.56, True),  # rose beyond 1 + 0.28: no more to gain
        (0.5, 2.0, -1.0, False),  # fell although good: pull back in full
        (0.5, -2.0, 1.6, True),  # fell beyond 1 - 0.2
        (1.5, -2.0, 3.0, False),  # rose although bad: push down in full
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    logprobs = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    terms = clipped_surrogate(
        logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28
    )
    terms.losses.sum().backward()
    assert terms.losses.item() == pytest.approx(loss, rel=1e-5)
    assert terms.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert terms.clipped.item() is clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "clip", "loss"),
    [
        (1.5, None, 0.5 * 0.25),
        (1.05, 0.1, 0.5 * 0.95**2),  # inside the band: the plain error
        (1.5, 0.1, 0.5 * 0.9**2),  # as if it had moved by 0.1 only
        (0.5, 0.1, 0.5 * 1.5**2),  # moved away: the plain error is larger
    ],
)
def test_clipped_value_loss(value: float, clip: float | None, loss: float) -> None:
    found = clipped_value_loss(
        torch.tensor([value]), torch.tensor([1.0]), torch.tensor([2.0]), clip=clip
    )
    assert found.item() == pytest.approx(loss, rel=1e-5)


def test_entropy() -> None:
    uniform = torch.full((2, 8), -math.log(8))
    assert entropy(uniform).tolist() == pytest.approx([math.log(8)] * 2)
    half = torch.tensor([0.5, 0.25, 0.25]).log()
    assert entropy(half).item() == pytest.approx(1.5 * math.log(2))


def test_kl_estimators_by_hand() -> None:
    p, q = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert kl_estimate(p, q, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(p, q, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(p, q, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator: KlEstimator) -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert (p * kl_estimate(p.log(), q.log(), estimator)).sum().item() == pytest.approx(
        exact.item()
    )


def test_gradients_of_estimators_as_losses() -> None:
    """Averaged over tokens drawn from p: k2 has the gradient of the divergence, k1 none at all."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q_logprobs = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logprobs = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - q_logprobs)).sum(), logits)[0]
    gradients = {}
    for estimator in KL_ESTIMATORS:
        logprobs = torch.log_softmax(logits, 0)
        drawn = (logprobs.exp().detach() * kl_estimate(logprobs, q_logprobs, estimator)).sum()
        gradients[estimator] = torch.autograd.grad(drawn, logits)[0]
    torch.testing.assert_close(gradients["k2"], exact)
    torch.testing.assert_close(gradients["k1"], torch.zeros(3, dtype=torch.float64))


MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("aggregation", "rows"),
    [
        ("token-mean", [1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 6, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2]),
    ],
)
def test_token_weights(aggregation: Aggregation, rows: list[float]) -> None:
    weights = token_weights(MASK, aggregation)
    assert weights[0].tolist() == pytest.approx([rows[0]] * 3 + [0])
    assert weights[1].tolist() == pytest.approx([rows[1], 0, 0, 0])
    assert not weights[2].any()


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_weights_of_nothing_are_nothing(aggregation: Aggregation) -> None:
    assert not token_weights(torch.zeros(2, 3), aggregation).any()
