"""Estimates of the Kullback-Leibler divergence from samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from perdure.algorithms.names import KlEstimator


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: Final[Mapping[KlEstimator, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {"k1": _k1, "k2": _k2, "k3": _k3}
)
"""Name → function of ``log p(x) - log q(x)``."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(p ‖ q) for tokens drawn from p; any shape, elementwise.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with
    ``d = log p - log q``: ``k1 = d`` is unbiased, of either sign; ``k2 = d² / 2`` is biased, never
    negative, and as a loss has the gradient of the KL; ``k3 = exp(-d) - 1 + d`` is unbiased and
    never negative. The gradient of k1 as a loss is zero on average: use k1 inside the reward.

    Args:
        logprobs: log p of the tokens.
        reference_logprobs: log q of the same tokens.
        estimator: One of the names of :data:`KL_ESTIMATORS`.
    """
    return KL_ESTIMATORS[estimator](logprobs - reference_logprobs)
