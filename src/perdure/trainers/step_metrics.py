"""Deterministic metrics of a global step: what was trained and how the updates went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from perdure.core.ids import GlobalStep, PolicyVersion
from perdure.core.record_types import EvictionReason, StopReason
from perdure.core.trajectories import RewardedGroup, Trajectory
from perdure.experience.age_policy import prompt_age
from perdure.experience.state import ExperienceState
from perdure.learner.api import LocalUpdateResult

COUNTS: Final = frozenset(
    {"mismatch_tokens", "mismatch_not_finite", "mismatch_cut", "off_policy_tokens"}
)
"""Metrics that add up over the local updates of a step."""
LARGEST: Final = frozenset({"mismatch_max", "importance_max"})
"""Metrics of which the largest counts."""
WEIGHTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mismatch_mean": "mismatch_tokens",
        "mismatch_k1": "mismatch_tokens",
        "mismatch_kl": "mismatch_tokens",
        "off_policy_ratio": "off_policy_tokens",
        "off_policy_kl": "off_policy_tokens",
    }
)
"""Means over tokens → the metric that counts these."""


SAMPLING: Final = frozenset(
    {"frontier", "oldest_in_flight_age", *(f"evicted_{reason.value}" for reason in EvictionReason)}
)
"""Metrics of how sampling stood at the end of a step; training it again does not change them."""


def sampling_metrics(state: ExperienceState, step: GlobalStep) -> dict[str, float]:
    """How sampling stands at the end of a step.

    Returns:
        ``frontier``: prompts submitted so far; ``oldest_in_flight_age``: prompt age of the oldest
        group in progress, 0 without one; ``evicted_<reason>``: groups evicted so far in the run.
    """
    oldest = next(state.table.open(), None)
    return {
        "frontier": float(state.table.next_data_index),
        "oldest_in_flight_age": 0.0
        if oldest is None
        else float(prompt_age(oldest.submitted, step)),
        **{
            f"evicted_{reason.value}": float(state.table.evictions[reason])
            for reason in EvictionReason
        },
    }


def rollout_metrics(
    groups: Sequence[RewardedGroup], *, published: PolicyVersion | None
) -> dict[str, float]:
    """Rewards, lengths (tokens), version spans and lags of the step's trajectories.

    Empty when every batch of the step was set aside.

    Args:
        groups: What was trained in the step.
        published: Version of the weights the step began with; without one there are no lags.
    """
    if not groups:
        return {}
    rewards = np.array([reward for group in groups for reward in group.rewards])
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = np.array([len(t.response_ids_T) for t in trajectories])
    uniform = [len(set(group.rewards)) == 1 for group in groups]
    cut = [t.stop_reason is StopReason.LENGTH for t in trajectories]
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "groups_without_signal": float(np.mean(uniform)),
        "length_limited": float(np.mean(cut)),
        **_version_metrics(trajectories, published),
        "groups": float(len(groups)),
        "tokens": float(lengths.sum()),
    }


def _version_metrics(
    trajectories: Sequence[Trajectory], published: PolicyVersion | None
) -> dict[str, float]:
    """Spans and lags; versions that a rewind has left behind lie ahead, and count as far off."""
    ranges = np.array([trajectory.version_range() for trajectory in trajectories])
    found = {"version_span": ranges[:, 1] - ranges[:, 0] + 1}
    if published is not None:
        lags = np.abs(published - ranges)
        found |= {"version_lag": lags.min(1), "version_lag_worst": lags.max(1)}
    return {
        f"{name}_{kind}": float(of(values))
        for name, values in found.items()
        for kind, of in (("mean", np.mean), ("max", np.max))
    }


def merge_updates(results: Sequence[LocalUpdateResult]) -> dict[str, float]:
    """One value a step for each metric that at least one of its local updates has.

    :data:`COUNTS` add up, of :data:`LARGEST` the largest counts, those of :data:`WEIGHTS` are means
    over tokens, and the others means over the updates.
    """
    names = sorted({name for result in results for name in result.metrics})
    return {
        name: _merged(name, [r.metrics for r in results if name in r.metrics]) for name in names
    }


def _merged(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    values = np.array([metrics[name] for metrics in updates])
    if name in COUNTS:
        return float(values.sum())
    if name in LARGEST:
        return float(values.max())
    if name in WEIGHTS:
        return float(np.average(values, weights=[metrics[WEIGHTS[name]] for metrics in updates]))
    return float(values.mean())
