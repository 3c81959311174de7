"""Advantage estimators. Legend: N trajectories, T tokens, G trajectories of one group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def group_advantages(
    rewards_N: Tensor, group_sizes: Sequence[int], *, normalise: bool = True
) -> Tensor:
    """GRPO: reward minus the group's mean, over the group's standard deviation if ``normalise``.

    Shao et al. 2024 (arXiv:2402.03300, §4.1.2); without the division: Liu et al. 2025
    (arXiv:2503.20783, "Dr. GRPO"). The standard deviation is the sample one (n - 1). A group whose
    rewards are all equal, or that has one member, says nothing: its advantages are exactly 0.

    Args:
        rewards_N: Floating, groups one after another.
        group_sizes: Sizes of the groups; they add up to N.

    Returns:
        (N,), dtype of the rewards.
    """
    return torch.cat([_centred(group_G, normalise) for group_G in rewards_N.split([*group_sizes])])


def _centred(rewards_G: Tensor, normalise: bool) -> Tensor:
    if bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std() + STD_EPSILON) if normalise else centred_G


def leave_one_out_advantages(rewards_N: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """RLOO: reward minus the mean of the *other* members of its group.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740, eq. 7). Equals the group-centred
    reward times n / (n - 1). A group of one or of equal rewards has advantage 0.

    Args and return as in :func:`group_advantages`.
    """
    centred_N = group_advantages(rewards_N, group_sizes, normalise=False)
    factors = [size / max(size - 1, 1) for size in group_sizes for _ in range(size)]
    return centred_N * torch.tensor(factors, dtype=rewards_N.dtype, device=rewards_N.device)


def generalized_advantages(
    rewards_NT: Tensor, values_NT: Tensor, mask_NT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE over the tokens that the policy chose; the others (tool output, padding) do not exist.

    Schulman et al. 2016 (arXiv:1506.02438, eq. 16): ``A_t = δ_t + γλ A_{t+1}`` with
    ``δ_t = r_t + γ V_{t+1} - V_t``, where t + 1 is the next chosen token. The end of a trajectory
    is terminal (value 0).

    Args:
        rewards_NT: Reward received after each token; read at chosen tokens only.
        values_NT: Value estimate before each token.
        mask_NT: Non-zero where the policy chose the token.

    Returns:
        Advantages and returns (advantages + values), both (N, T), 0 where masked out.
    """
    chosen_NT = mask_NT.bool()
    advantages_NT = torch.zeros_like(values_NT)
    running_N = torch.zeros_like(values_NT[:, 0])
    next_value_N = torch.zeros_like(running_N)
    for t in range(values_NT.shape[1] - 1, -1, -1):
        chosen_N, value_N = chosen_NT[:, t], values_NT[:, t]
        delta_N = rewards_NT[:, t] + gamma * next_value_N - value_N
        running_N = torch.where(chosen_N, delta_N + gamma * lam * running_N, running_N)
        next_value_N = torch.where(chosen_N, value_N, next_value_N)
        advantages_NT[:, t] = running_N
    advantages_NT = torch.where(chosen_NT, advantages_NT, 0.0)
    return advantages_NT, torch.where(chosen_NT, advantages_NT + values_NT, 0.0)


def whiten(advantages_M: Tensor) -> Tensor:
    """Shift and scale to mean 0 and (population) standard deviation 1; constant input gives 0."""
    centred_M = advantages_M - advantages_M.mean()
    return centred_M / (centred_M.square().mean().sqrt() + STD_EPSILON)
