"""Engine against learner: like with like, and only where the weights were the same."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import MODEL, make_model, trajectory, update_id

from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.core.trajectories import RewardedGroup, Segment
from perdure.learner.config import LearnerConfig
from perdure.learner.local import LearnerSetup, LocalLearner
from perdure.learner.witness import Truncation
from perdure.models import Transformer, weights_of
from perdure.rollout import EmbeddedEngine, EngineOptions
from perdure.runtime.trajectory_builder import trajectory_from_chunks

VERSION = PolicyVersion(3)
FLOAT_ERROR = 2e-5
SETTINGS = [
    {},
    {"mini_batches": 2},
    {"old_logprobs": "anchor"},
    {"old_logprobs": "rollout"},
    {"importance": {"mode": "truncate"}},
]


def make(model: Transformer, settings: dict[str, Any], **setup: Any) -> LocalLearner:
    learner = LocalLearner(
        model,
        config=LearnerConfig.model_validate({"lr": 0.01, **settings}),
        setup=LearnerSetup(
            seed=7, total_local_updates=10, local_updates_per_step=4, deterministic=True, **setup
        ),
    )
    learner.begin_training()
    return learner


async def generated(model: Transformer, sampling: SamplingParams) -> list[RewardedGroup]:
    """Two groups of four answers by a real engine that holds the weights as ``VERSION``."""
    engine = EmbeddedEngine(MODEL, EngineOptions(slots=4, max_tokens=16, deterministic=True))
    await engine.load_weights(VERSION, weights_of(model))
    groups: list[RewardedGroup] = []
    for group in range(2):
        prompt = (1 + group, 2)
        rows = []
        for index in range(4):
            one = trajectory(group, index, prompt, [])
            request = GenerationRequest(one.session.key(), prompt, sampling, (5, group, index))
            chunks = [chunk async for chunk in engine.generate(request)]
            rows.append(trajectory_from_chunks(one.session, prompt_ids=prompt, chunks=chunks))
        groups.append(RewardedGroup(group, tuple(rows), (0.0, 1.0, 2.0, 0.5)))
    await engine.close()
    return groups


def run(sampling: SamplingParams, model: Transformer) -> list[RewardedGroup]:
    return asyncio.run(generated(model, sampling))


def wide_model() -> Transformer:
    """With uneven probabilities, so that truncation cuts something."""
    model = make_model()
    with torch.no_grad():
        model.embed.weight.mul_(8.0)
    return model


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(3), Truncation(0, 0.8)])
def test_a_right_engine_differs_by_float_error(
    settings: dict[str, Any], truncation: Truncation
) -> None:
    model = wide_model()
    sampling = SamplingParams(
        temperature=0.9, top_k=truncation.top_k, top_p=truncation.top_p, max_new_tokens=6
    )
    groups = run(sampling, model)
    learner = make(model, settings, temperature=0.9, truncation=truncation)
    metrics = learner.local_update(update_id(1), groups, version=VERSION).metrics
    assert metrics["mismatch_tokens"] == metrics["trained_tokens"] == 48
    assert metrics["mismatch_max"] < FLOAT_ERROR
    assert metrics["mismatch_not_finite"] == 0
    assert abs(metrics["mismatch_k1"]) < FLOAT_ERROR
    assert metrics["mismatch_kl"] < FLOAT_ERROR
    assert metrics.get("mismatch_cut", 0.0) == 0
    assert "off_policy_tokens" not in metrics


def test_truncated_against_whole_would_be_a_mismatch() -> None:
    """What is compared with the wrong distribution is far off, so the test above says something."""
    model = wide_model()
    groups = run(SamplingParams(top_k=3, max_new_tokens=6), model)
    metrics = make(model, {}).local_update(update_id(1), groups, version=VERSION).metrics
    assert metrics["mismatch_mean"] > 0.02


@pytest.mark.parametrize("settings", SETTINGS)
def test_only_tokens_of_the_same_weights_are_a_mismatch(settings: dict[str, Any]) -> None:
    """Of every answer the first two tokens are of an older version."""
    model = make_model()
    groups = [
        RewardedGroup(
            group.group, tuple(_half_old(one) for one in group.trajectories), group.rewards
        )
        for group in run(SamplingParams(max_new_tokens=6), model)
    ]
    learner = make(model, settings)
    metrics = learner.local_update(update_id(1), groups, version=VERSION).metrics
    assert (metrics["mismatch_tokens"], metrics["off_policy_tokens"]) == (32, 16)
    assert metrics["mismatch_max"] < FLOAT_ERROR
    assert metrics["off_policy_ratio"] == pytest.approx(math.exp(-1), rel=1e-3)
    assert metrics["off_policy_kl"] == pytest.approx(math.exp(-1), rel=1e-3)  # exp(-d) - 1 + d
    unknown = make(make_model(), settings).local_update(update_id(1), groups).metrics
    assert unknown["off_policy_tokens"] == 48
    assert "mismatch_tokens" not in unknown


def _half_old(one: Any) -> Any:
    logprobs = one.logprobs_T.copy()
    logprobs[:2] += 1.0
    segments = (Segment(PolicyVersion(2), 0, 2), Segment(VERSION, 2, 6))
    return dataclasses.replace(one, logprobs_T=logprobs, segments=segments)


@pytest.mark.parametrize(("old", "mismatched"), [("recompute", 0), ("rollout", 0), ("anchor", 48)])
def test_later_local_updates_judge_the_engine_by_the_anchor_only(old: str, mismatched: int) -> None:
    """The live weights are no published version any more; those of the anchor still are."""
    model = make_model()
    groups = run(SamplingParams(max_new_tokens=6), model)
    learner = make(model, {"old_logprobs": old})
    for index in (0, 1):
        result = learner.local_update(update_id(1, index), groups, version=VERSION)
    metrics = result.metrics
    assert metrics.get("mismatch_tokens", 0) == mismatched
    assert metrics.get("off_policy_tokens", 0) == 48 - mismatched
    assert metrics.get("mismatch_max", 0) < FLOAT_ERROR


def test_bypass_looks_at_what_it_trains_before_the_weights_move() -> None:
    groups = run(SamplingParams(max_new_tokens=6), make_model())
    settings = {"old_logprobs": "rollout", "mini_batches": 4, "ppo_epochs": 2}
    metrics = (
        make(make_model(), settings).local_update(update_id(1), groups, version=VERSION).metrics
    )
    assert metrics["mismatch_tokens"] == 48 / 4
    assert metrics["mismatch_max"] < FLOAT_ERROR


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_no_number_is_counted_and_not_averaged(broken: float) -> None:
    groups = run(SamplingParams(max_new_tokens=6), make_model())
    groups[0].trajectories[0].logprobs_T[1] = broken
    metrics = make(make_model(), {}).local_update(update_id(1), groups, version=VERSION).metrics
    assert metrics["mismatch_not_finite"] == 1
    assert metrics["mismatch_tokens"] == 48
    assert metrics["mismatch_max"] < FLOAT_ERROR


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_is_measured_before_and_after_the_bounds(level: str) -> None:
    """All tokens of one answer of six were logged at half their probability."""
    model = make_model()
    groups = run(SamplingParams(max_new_tokens=6), model)
    groups[0].trajectories[0].logprobs_T[:] -= math.log(2)
    settings = {"importance": {"mode": "truncate", "level": level, "upper": 1.5}}
    metrics = make(model, settings).local_update(update_id(1), groups, version=VERSION).metrics
    raw = 2.0 if level == "token" else 2.0**6
    weights = np.array([1.5, *[1.0] * 7])
    assert metrics["importance_mean"] == pytest.approx((raw + 7) / 8, rel=1e-4)
    assert metrics["importance_max"] == pytest.approx(raw, rel=1e-4)
    assert metrics["importance_bounded"] == pytest.approx(1 / 8)
    expected = weights.sum() ** 2 / (8 * (weights**2).sum())
    assert metrics["importance_effective"] == pytest.approx(expected, rel=1e-4)
