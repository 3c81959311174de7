"""From rewards to what the losses need: advantages and returns. Legend as in ``batch.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algorithms.advantages import (
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    whiten,
)
from perdure.algorithms.divergences import kl_estimate
from perdure.algorithms.importance import effective_share, importance_terms
from perdure.learner.batch import UpdateBatch
from perdure.learner.config import LearnerConfig
from perdure.learner.witness import Witness


@dataclass(slots=True)
class Signals:
    """Per-token inputs of a local update's losses, each float32 (M,).

    Attributes:
        old_logprobs_M: Of the policy that the ratio refers to.
        old_is_current: The single optimizer step to come starts from that very policy, so its own
            forward pass fills ``old_logprobs_M``.
        witness: What the engines' log-probabilities are compared with.
        reference_M: Log-probabilities of the reference policy, if there is a penalty.
        values_M: Of the critic at the start of the local update (ppo).
        advantages_M: Set by :func:`set_advantages`.
        returns_M: What the critic learns (ppo); set by :func:`set_advantages`.
        importance_M: What a token's loss is multiplied with, if anything; set by
            :func:`set_importance`.
    """

    old_logprobs_M: Tensor
    old_is_current: bool
    witness: Witness
    reference_M: Tensor | None
    values_M: Tensor | None
    advantages_M: Tensor
    returns_M: Tensor
    importance_M: Tensor | None = None


def set_importance(config: LearnerConfig, batch: UpdateBatch, signals: Signals) -> dict[str, float]:
    """Fill in the importance weights, old policy against the one that sampled; their metrics.

    Mean and maximum are of the weights before the bounds, the effective share after them; all are
    over tokens, or over trajectories when a weight is a trajectory's.
    """
    importance = config.importance
    if importance.mode == "none":
        return {}
    mask_NR = batch.mask_NR
    terms = importance_terms(
        batch.spread(signals.old_logprobs_M - batch.rollout_logprobs_M),
        mask_NR,
        mode=importance.mode,
        level=importance.level,
        lower=importance.lower,
        upper=importance.upper,
    )
    signals.importance_M = terms.weights[mask_NR]
    counted_NR = mask_NR
    if importance.level == "sequence":
        counted_NR = mask_NR & (mask_NR.long().cumsum(1) == 1)
    raw = terms.raw[counted_NR]
    return {
        "importance_mean": float(raw.mean()),
        "importance_max": float(raw.max()),
        "importance_bounded": float(terms.bounded[counted_NR].float().mean()),
        "importance_effective": float(effective_share(terms.weights[counted_NR])),
    }


def set_advantages(config: LearnerConfig, batch: UpdateBatch, signals: Signals) -> None:
    """Fill in advantages and returns.

    The reward of a trajectory is received after its last chosen token. A penalty placed in the
    reward is taken off at the token it belongs to.
    """
    penalty_M = _reward_penalty(config, signals)
    if config.algorithm in ("grpo", "rloo"):
        rewards_N = batch.rewards_N - batch.spread(penalty_M).sum(1)
        advantages_N = _group_advantages(config, rewards_N, batch)
        signals.advantages_M = advantages_N.float()[:, None].expand(batch.mask_NR.shape)[
            batch.mask_NR
        ]
        return
    rewards_NR = _rewards_at_end(batch) - batch.spread(penalty_M)
    values_M = torch.zeros_like(penalty_M) if signals.values_M is None else signals.values_M
    advantages_NR, returns_NR = generalized_advantages(
        rewards_NR,
        batch.spread(values_M),
        batch.mask_NR,
        gamma=config.gamma,
        lam=1.0 if signals.values_M is None else config.lam,
    )
    advantages_M = advantages_NR[batch.mask_NR]
    signals.advantages_M = whiten(advantages_M) if config.normalise_advantages else advantages_M
    signals.returns_M = returns_NR[batch.mask_NR]


def _group_advantages(config: LearnerConfig, rewards_N: Tensor, batch: UpdateBatch) -> Tensor:
    if config.algorithm == "rloo":
        return leave_one_out_advantages(rewards_N, batch.group_sizes)
    return group_advantages(rewards_N, batch.group_sizes, normalise=config.normalise_advantages)


def _reward_penalty(config: LearnerConfig, signals: Signals) -> Tensor:
    if signals.reference_M is None or config.kl.placement == "loss":
        return torch.zeros_like(signals.old_logprobs_M)
    divergence_M = kl_estimate(signals.old_logprobs_M, signals.reference_M, config.kl.estimator)
    return config.kl.coef * divergence_M


def _rewards_at_end(batch: UpdateBatch) -> Tensor:
    """(N, R), each trajectory's reward at its last chosen token."""
    mask_NR = batch.mask_NR
    remaining_NR = mask_NR.long().flip(1).cumsum(1).flip(1)
    last_NR = mask_NR & (remaining_NR == 1)
    return torch.where(last_NR, batch.rewards_N.float()[:, None], 0.0)
