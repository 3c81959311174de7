"""Small models and batches for tests of the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from perdure.core.components import ComponentState
from perdure.core.ids import GlobalStep, GroupId, LocalUpdate, PolicyVersion, SessionId, UpdateId
from perdure.core.record_types import StopReason
from perdure.core.trajectories import RewardedGroup, Segment, Trajectory
from perdure.learner.api import Learner
from perdure.learner.config import LearnerConfig
from perdure.learner.local import LearnerSetup, LocalLearner
from perdure.models import ModelConfig, Transformer, init_weights

torch.set_num_threads(1)

VOCAB = 8
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    max_positions=64,
)


def make_model(seed: int = 1) -> Transformer:
    model = Transformer(MODEL)
    init_weights(model, seed)
    return model


def make_learner(
    settings: Mapping[str, Any] | None = None,
    *,
    updates: int = 10,
    model: Transformer | None = None,
    temperature: float = 1.0,
) -> LocalLearner:
    learner = LocalLearner(
        make_model() if model is None else model,
        config=LearnerConfig.model_validate(settings or {}),
        setup=LearnerSetup(
            seed=7, total_local_updates=updates, temperature=temperature, deterministic=True
        ),
    )
    learner.begin_training()
    return learner


def update_id(step: int, index: int = 0) -> UpdateId:
    return UpdateId(GlobalStep(step), LocalUpdate(index))


def trajectory(
    group: int,
    index: int,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    mask: Sequence[int] | None = None,
) -> Trajectory:
    length = len(response)
    one = Trajectory(
        session=SessionId(GroupId(group), index),
        prompt_ids_P=np.array(prompt, dtype=np.int32),
        response_ids_T=np.array(response, dtype=np.int32),
        logprobs_T=np.full(length, -np.log(VOCAB), dtype=np.float32),
        loss_mask_T=np.array([1] * length if mask is None else mask, dtype=np.uint8),
        segments=(Segment(PolicyVersion(1), 0, length),) if length else (),
        stop_reason=StopReason.STOP,
    )
    one.check()
    return one


def random_groups(
    *, groups: int = 4, sessions: int = 4, seed: int = 0, masked: bool = False
) -> list[RewardedGroup]:
    """Groups of ragged lengths and random rewards; ``masked`` puts tool output into responses."""
    draws = np.random.default_rng(seed)
    made: list[RewardedGroup] = []
    for group in range(groups):
        prompt = draws.integers(0, VOCAB, draws.integers(1, 6)).tolist()
        trajectories: list[Trajectory] = []
        for index in range(sessions):
            length = int(draws.integers(1, 9))
            response = draws.integers(0, VOCAB, length).tolist()
            mask = draws.integers(0, 2, length).tolist() if masked else None
            trajectories.append(trajectory(group, index, prompt, response, mask=mask))
        rewards = tuple(float(reward) for reward in draws.integers(0, 3, sessions))
        made.append(RewardedGroup(group, tuple(trajectories), rewards))
    return made


def save(learner: Learner) -> dict[str, tuple[ComponentState, int]]:
    """Copies of every component, as numpy arrays and plain values."""
    saved: dict[str, tuple[ComponentState, int]] = {}
    for name, component in learner.components().items():
        state = component.state()
        tensors = {key: tensor.detach().numpy().copy() for key, tensor in state.tensors.items()}
        saved[name] = (ComponentState(tensors, dict(state.values)), component.schema_version)
    return saved


def restore(learner: Learner, saved: Mapping[str, tuple[ComponentState, int]]) -> None:
    for name, component in learner.components().items():
        component.load(*saved[name])
