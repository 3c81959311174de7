"""What a step says of its trajectories and its updates, and when its engines raise an alarm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import experience_records as make
import pytest
from drill_tools import RECIPE
from learner_cases import trajectory

from perdure.config import load_config
from perdure.core.errors import ConfigError
from perdure.core.ids import GlobalStep, PolicyVersion
from perdure.core.record_types import EvictionReason
from perdure.core.trajectories import RewardedGroup, Segment, Trajectory
from perdure.experience.fold import fold
from perdure.learner.api import LocalUpdateResult
from perdure.trainers.config import RunConfig
from perdure.trainers.mismatch_watch import MismatchWatch
from perdure.trainers.step_metrics import (
    SAMPLING,
    merge_updates,
    rollout_metrics,
    sampling_metrics,
)


def with_versions(index: int, versions: Sequence[int]) -> Trajectory:
    """One token a version."""
    segments = tuple(Segment(PolicyVersion(v), at, at + 1) for at, v in enumerate(versions))
    return dataclasses.replace(trajectory(0, index, [1], [2] * len(versions)), segments=segments)


def test_spans_and_lags_of_versions() -> None:
    """Lag is published - last, at worst published - first; 12 is a version left by a rewind."""
    group = RewardedGroup(
        0, tuple(with_versions(i, v) for i, v in enumerate([[9, 9], [5, 8], [12]])), (0.0, 0.0, 1.0)
    )
    metrics = rollout_metrics([group], published=PolicyVersion(9))
    found = {name: value for name, value in metrics.items() if name.startswith("version")}
    assert found == {
        "version_span_mean": pytest.approx((1 + 4 + 1) / 3),
        "version_span_max": 4,
        "version_lag_mean": pytest.approx((0 + 1 + 3) / 3),
        "version_lag_max": 3,
        "version_lag_worst_mean": pytest.approx((0 + 4 + 3) / 3),
        "version_lag_worst_max": 4,
    }
    without = rollout_metrics([group], published=None)
    assert without == {k: v for k, v in metrics.items() if not k.startswith("version_lag")}


def test_updates_are_merged_by_what_a_metric_means() -> None:
    results = [
        LocalUpdateResult(
            {"lr": 1.0, "mismatch_tokens": 30, "mismatch_mean": 0.1, "mismatch_max": 0.5}
        ),
        LocalUpdateResult(
            {"lr": 3.0, "mismatch_tokens": 10, "mismatch_mean": 0.5, "mismatch_max": 0.2}
        ),
        LocalUpdateResult({"lr": 5.0, "off_policy_tokens": 7, "off_policy_ratio": 0.5}),
    ]
    assert merge_updates(results) == {
        "lr": 3.0,
        "mismatch_tokens": 40,
        "mismatch_mean": pytest.approx(0.2),
        "mismatch_max": 0.5,
        "off_policy_tokens": 7,
        "off_policy_ratio": 0.5,
    }


def mismatch(mean: float, *, broken: float = 0) -> dict[str, float]:
    return {
        "mismatch_tokens": 8,
        "mismatch_not_finite": broken,
        "mismatch_mean": mean,
        "mismatch_max": 2 * mean,
    }


def test_the_alarm_speaks_when_a_mismatch_begins() -> None:
    watch = MismatchWatch(0.1)
    means = [0.0, 0.1, 0.11, 0.2, 0.05, 0.3]
    told = [watch.look(mismatch(mean)) is not None for mean in means]
    assert told == [False, False, True, False, False, True]
    assert watch.look({}) is None
    message = watch.look(mismatch(0.0, broken=3))
    assert message is not None
    assert "3 of 8" in message


def test_the_alarm_can_be_turned_off() -> None:
    assert MismatchWatch(None).look(mismatch(9.0, broken=1)) is None


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["learner.old_logprobs=rollout", "learner.importance.mode=mask"], "importance.mode"),
        (["learner.importance.mode=truncate", "learner.importance.lower=0.5"], "importance.lower"),
        (["learner.importance.lower=0.5"], "importance.lower"),
        (["learner.importance.upper=0.5"], "importance.upper"),
        (["learner.importance.mode=mask", "learner.importance.lower=1"], "importance.lower"),
        (["learner.old_logprobs=rollout", "rollout.top_k=5"], "learner.old_logprobs"),
        (["learner.old_logprobs=rollout", "rollout.top_p=0.9"], "learner.old_logprobs"),
        (["learner.old_logprobs=anker"], "learner.old_logprobs"),
    ],
)
def test_impossible_corrections_are_refused_with_a_way_out(
    overrides: list[str], field: str
) -> None:
    with pytest.raises(ConfigError, match="way out") as caught:
        load_config(RunConfig, RECIPE, overrides)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["learner.old_logprobs=rollout"],
        ["learner.old_logprobs=anchor", "learner.importance.mode=truncate", "rollout.top_p=0.9"],
        ["learner.importance.mode=mask", "learner.importance.lower=0.5"],
    ],
)
def test_possible_ones_are_not(overrides: list[str]) -> None:
    load_config(RunConfig, RECIPE, overrides)


def test_how_sampling_stands_at_the_end_of_a_step() -> None:
    records = [
        *make.finished_group(0),
        make.submitted(1, step=2),
        make.evicted(0, EvictionReason.FILTERED),
        make.submitted(2, step=3),
        make.refilled(2, 0),
    ]
    found = sampling_metrics(fold(make.placed(records)), GlobalStep(4))
    assert found.keys() == SAMPLING
    assert {name: value for name, value in found.items() if value} == {
        "frontier": 3.0,
        "oldest_in_flight_age": 3.0,
        "evicted_filtered": 1.0,
    }
    assert sampling_metrics(fold([]), GlobalStep(1))["oldest_in_flight_age"] == 0.0
