"""Deterministic metrics of a global step: what was trained and how the updates went."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perdure.core.record_types import StopReason
from perdure.core.trajectories import RewardedGroup
from perdure.learner.api import LocalUpdateResult


def rollout_metrics(groups: Sequence[RewardedGroup]) -> dict[str, float]:
    """Rewards, lengths (tokens) and version spans of the step's trajectories.

    Empty when every batch of the step was set aside.
    """
    if not groups:
        return {}
    rewards = np.array([reward for group in groups for reward in group.rewards])
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = np.array([len(t.response_ids_T) for t in trajectories])
    ranges = [trajectory.version_range() for trajectory in trajectories]
    spans = [last - first + 1 for first, last in ranges]
    uniform = [len(set(group.rewards)) == 1 for group in groups]
    cut = [t.stop_reason is StopReason.LENGTH for t in trajectories]
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "groups_without_signal": float(np.mean(uniform)),
        "length_limited": float(np.mean(cut)),
        "version_span_mean": float(np.mean(spans)),
        "version_span_max": float(np.max(spans)),
        "groups": float(len(groups)),
        "tokens": float(lengths.sum()),
    }


def merge_updates(results: Sequence[LocalUpdateResult]) -> dict[str, float]:
    """Mean over the step's local updates of each metric that at least one of them has."""
    names = sorted({name for result in results for name in result.metrics})
    return {
        name: float(np.mean([r.metrics[name] for r in results if name in r.metrics]))
        for name in names
    }
