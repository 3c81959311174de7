"""Losses per token and how they are added up. Legend: N trajectories, T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from perdure.algorithms.names import Aggregation


@dataclass(frozen=True, slots=True)
class SurrogateTerms:
    """What the clipped surrogate says of each token; all of one shape.

    Attributes:
        losses: To be minimised; carries the gradient.
        ratio: π(token) / π_old(token), detached.
        clipped: Bool, true where clipping took the gradient away.
    """

    losses: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateTerms:
    """PPO's pessimistic surrogate, elementwise: ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    Schulman et al. 2017 (arXiv:1707.06347, eq. 7); bounds of different size ("clip-higher"): Yu et
    al. 2025 (arXiv:2503.14476, §3.1).

    Args:
        logprobs: Under the policy that is trained.
        old_logprobs: Under the policy the ratio refers to; no gradient flows into it.
        advantages: No gradient flows into them.
        clip_low: Below 1 by how much the ratio may fall before a negative advantage stops counting.
        clip_high: Above 1 by how much it may rise before a positive one does.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return SurrogateTerms(
        losses=torch.maximum(plain, bounded),
        ratio=ratio.detach(),
        clipped=(bounded > plain).detach(),
    )


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> Tensor:
    """Squared error of a value estimate that may move by ``clip`` only, elementwise, times 1/2.

    The larger of the errors of V and of V clipped to ``old ± clip``, as in the implementation of
    Schulman et al. 2017 (its place in the theory: Engstrom et al. 2020, arXiv:2005.12729, §3).
    ``clip=None``: the plain error.
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (bounded - returns).square())


def entropy(logprobs_V: Tensor) -> Tensor:
    """Entropy in nats of distributions given as normalised log-probabilities (…, V) → (…)."""
    return -(logprobs_V.exp() * logprobs_V).sum(-1)


def _token_mean(mask_NT: Tensor) -> Tensor:
    return mask_NT / mask_NT.sum().clamp(min=1)


def _sequence_mean_token_mean(mask_NT: Tensor) -> Tensor:
    lengths_N1 = mask_NT.sum(1, keepdim=True)
    return mask_NT / (lengths_N1.clamp(min=1) * (lengths_N1 > 0).sum().clamp(min=1))


def _sequence_mean_token_sum(mask_NT: Tensor) -> Tensor:
    return mask_NT / (mask_NT.sum(1) > 0).sum().clamp(min=1)


AGGREGATIONS: Final[Mapping[Aggregation, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "token-mean": _token_mean,
        "seq-mean-token-mean": _sequence_mean_token_mean,
        "seq-mean-token-sum": _sequence_mean_token_sum,
    }
)
"""Name → weights of a mask."""


def token_weights(mask_NT: Tensor, aggregation: Aggregation) -> Tensor:
    """Weight of each token's loss in the loss of a mini-batch, float32 (N, T).

    A mini-batch's loss is ``(weights * losses).sum()``. The weights are those of the whole
    mini-batch, so the sum does not depend on the micro-batches it was added up in. Sequences
    without a chosen token do not count.

    * ``token-mean``: every token alike (Yu et al. 2025, arXiv:2503.14476, eq. 12).
    * ``seq-mean-token-mean``: the mean over sequences of their token means (Shao et al. 2024,
      arXiv:2402.03300, eq. 3).
    * ``seq-mean-token-sum``: the mean over sequences of their sums (Liu et al. 2025,
      arXiv:2503.20783, without the constant).

    Args:
        mask_NT: Non-zero where the policy chose the token.
        aggregation: One of the names of :data:`AGGREGATIONS`.
    """
    return AGGREGATIONS[aggregation](mask_NT.bool().float())
