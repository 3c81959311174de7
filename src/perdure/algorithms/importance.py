"""Importance weights of tokens that another policy sampled. Legend: N trajectories, T tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algorithms.names import ImportanceLevel, ImportanceMode


@dataclass(frozen=True, slots=True)
class ImportanceTerms:
    """Weights before and after the bounds, all of one shape.

    Attributes:
        weights: What a token's loss is multiplied with; 0 where the policy did not choose.
        raw: The ratio itself; 0 there too.
        bounded: Bool, true where the bounds changed something.
    """

    weights: Tensor
    raw: Tensor
    bounded: Tensor


def importance_terms(
    log_ratio_NT: Tensor,
    mask_NT: Tensor,
    *,
    mode: ImportanceMode,
    level: ImportanceLevel,
    lower: float,
    upper: float,
) -> ImportanceTerms:
    """Weights π(token) / μ(token) of tokens drawn from the behaviour policy μ, within bounds.

    ``truncate`` caps a weight at ``upper`` (Ionides 2008, "Truncated Importance Sampling", §2);
    ``mask`` makes it 0 outside ``lower … upper``. The weight of a ``sequence`` is the product of
    its tokens' and stands at each of them.

    Args:
        log_ratio_NT: log π - log μ of each token; read at chosen tokens only.
        mask_NT: Non-zero where the policy chose the token.
        mode: ``none`` gives the ratio as it is.
        level: Whether a weight is a token's own or its trajectory's.
        lower: At most 1; counts for ``mask`` alone.
        upper: At least 1.

    Returns:
        Terms of shape (N, T), dtype of the ratio.
    """
    chosen_NT = mask_NT.bool()
    log_NT = torch.where(chosen_NT, log_ratio_NT, 0.0)
    if level == "sequence":
        log_NT = log_NT.sum(1, keepdim=True).expand_as(log_NT)
    raw_NT = torch.where(chosen_NT, log_NT.exp(), 0.0)
    bounded_NT = torch.zeros_like(chosen_NT)
    weights_NT = raw_NT
    if mode == "truncate":
        bounded_NT = chosen_NT & (raw_NT > upper)
        weights_NT = raw_NT.clamp(max=upper)
    elif mode == "mask":
        bounded_NT = chosen_NT & ((raw_NT > upper) | (raw_NT < lower))
        weights_NT = raw_NT.masked_fill(bounded_NT, 0.0)
    return ImportanceTerms(weights_NT, raw_NT, bounded_NT)


def effective_share(weights: Tensor) -> Tensor:
    """Effective sample size over sample size, ``(Σw)² / (n Σw²)``: 1 if all weights are equal.

    Kong 1992. Weights that are all 0 count for nothing: 0.
    """
    squares = weights.square().sum()
    share = weights.sum().square() / (weights.numel() * squares)
    return torch.where(squares > 0, share, 0.0)
