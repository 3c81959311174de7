"""Importance weights and truncation against numbers worked out by hand, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from perdure.algorithms.importance import effective_share, importance_terms
from perdure.algorithms.names import ImportanceLevel, ImportanceMode
from perdure.learner.witness import Truncation, truncated_logprobs

# Ratios of chosen tokens: 3, 1/2, 1 in the first trajectory and 1/8, 1/2 in the second.
RATIOS = [[3.0, 99.0, 0.5, 1.0], [0.125, 0.5, 99.0, 99.0]]
MASK = [[1, 0, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("mode", "level", "expected", "bounded"),
    [
        ("none", "token", [3, 0.5, 1, 0.125, 0.5], [0, 0, 0, 0, 0]),
        ("truncate", "token", [2, 0.5, 1, 0.125, 0.5], [1, 0, 0, 0, 0]),
        ("mask", "token", [0, 0.5, 1, 0, 0.5], [1, 0, 0, 1, 0]),
        ("none", "sequence", [1.5, 1.5, 1.5, 0.0625, 0.0625], [0, 0, 0, 0, 0]),
        ("truncate", "sequence", [1.5, 1.5, 1.5, 0.0625, 0.0625], [0, 0, 0, 0, 0]),
        ("mask", "sequence", [1.5, 1.5, 1.5, 0, 0], [0, 0, 0, 1, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_within_bounds(
    mode: ImportanceMode,
    level: ImportanceLevel,
    expected: list[float],
    bounded: list[int],
    dtype: torch.dtype,
) -> None:
    mask = torch.tensor(MASK, dtype=torch.uint8)
    log_ratio = torch.tensor(RATIOS, dtype=dtype).log()
    terms = importance_terms(log_ratio, mask, mode=mode, level=level, lower=0.25, upper=2.0)
    chosen = mask.bool()
    assert terms.weights.dtype == dtype
    torch.testing.assert_close(terms.weights[chosen], torch.tensor(expected, dtype=dtype))
    assert terms.bounded[chosen].int().tolist() == bounded
    for values in (terms.weights, terms.raw, terms.bounded):
        assert not values[~chosen].any()


def test_the_sequence_bound_is_on_the_product() -> None:
    """Two tokens of ratio 1.5 are within a token's bound of 2; their trajectory, 2.25, is not."""
    log_ratio, mask = torch.tensor([[1.5, 1.5]], dtype=torch.float64).log(), torch.ones(1, 2)
    bounds = {"lower": 0.0, "upper": 2.0}
    for level, weights in (("token", [1.5, 1.5]), ("sequence", [2.0, 2.0])):
        terms = importance_terms(log_ratio, mask, mode="truncate", level=level, **bounds)
        torch.testing.assert_close(terms.weights[0], torch.tensor(weights, dtype=torch.float64))
    masked = importance_terms(log_ratio, mask, mode="mask", level="sequence", **bounds)
    assert not masked.weights.any()


def test_a_ratio_beyond_all_numbers_is_bounded_too() -> None:
    log_ratio, mask = torch.tensor([[1e4, -1e4]]), torch.ones(1, 2)
    cut = importance_terms(log_ratio, mask, mode="truncate", level="token", lower=0, upper=3.0)
    assert cut.weights.tolist() == [[3.0, 0.0]]
    masked = importance_terms(log_ratio, mask, mode="mask", level="token", lower=0, upper=3.0)
    assert masked.weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("weights", "share"), [([2.0, 2.0, 2.0], 1.0), ([1.0, 0.0], 0.5), ([3.0, 1.0], 0.8), ([0.0], 0)]
)
def test_effective_share(weights: list[float], share: float) -> None:
    assert effective_share(torch.tensor(weights)).item() == pytest.approx(share)


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [0, 1]),
        (0, 0.6, [0, 1]),
        (3, 0.85, [0, 1, 2]),
        (1, 0.1, [0]),
    ],
)
def test_truncated_logprobs(top_k: int, top_p: float, left: list[int]) -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05: what is left is scaled to 1."""
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    logprobs = torch.tensor(np.log(probs)).expand(4, 4)
    found, cut = truncated_logprobs(logprobs, torch.arange(4), Truncation(top_k, top_p))
    for token in range(4):
        total = probs[sorted({*left, token})].sum()
        assert found[token].item() == pytest.approx(math.log(probs[token] / total), abs=1e-12)
        assert cut[token].item() is (token not in left)
