"""Decoupled PPO against a loop written by hand: K local updates of a step, one fixed old policy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import VOCAB, make_model, trajectory, update_id

from perdure.core.ids import GlobalStep, LocalUpdate, UpdateId
from perdure.core.trajectories import RewardedGroup
from perdure.learner.anchor import PolicyAnchor
from perdure.learner.config import LearnerConfig
from perdure.learner.descent import deal
from perdure.learner.determinism import deterministic_math
from perdure.learner.local import LearnerSetup, LocalLearner
from perdure.models import Transformer, digest_weights, weights_of

SEED, LR, UPPER = 7, 0.02, 1.2
LENGTHS = [3, 5, 7]
"""Response lengths of the trajectories of a group; prompts are 2 tokens, so that rows differ."""


def make(updates: int, **settings: Any) -> LocalLearner:
    learner = LocalLearner(
        make_model(),
        config=LearnerConfig.model_validate(
            {"lr": LR, "old_logprobs": "anchor", "clip_high": 0.1, **settings}
        ),
        setup=LearnerSetup(
            seed=SEED,
            total_local_updates=100,
            local_updates_per_step=updates,
            deterministic=True,
        ),
    )
    learner.begin_training()
    return learner


def batch(number: int) -> list[RewardedGroup]:
    draws = np.random.default_rng(number)
    groups: list[RewardedGroup] = []
    for group in range(2):
        prompt = draws.integers(0, VOCAB, 2).tolist()
        rows = [
            trajectory(group, index, prompt, draws.integers(0, VOCAB, length).tolist())
            for index, length in enumerate(LENGTHS)
        ]
        for row in rows:
            row.logprobs_T[:] += draws.normal(0, 0.3, len(row.logprobs_T))
        groups.append(RewardedGroup(group, tuple(rows), (0.0, 1.0, 3.0)))
    return groups


class ByHand:
    """The policy as one tensor program per mini-batch, with ``torch.optim`` and deep copies."""

    def __init__(self, mini_batches: int, mode: str) -> None:
        self.model = make_model()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors}],
            lr=LR,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            fused=True,
        )
        self.mini_batches, self.mode = mini_batches, mode

    def step(self, number: int, updates: int) -> None:
        """One global step: the old policy is the one at its start, for each of its updates."""
        old_policy = copy.deepcopy(self.model)
        for index in range(updates):
            self.local_update(UpdateId(GlobalStep(number), LocalUpdate(index)), old_policy)

    def local_update(self, update: UpdateId, old_policy: Transformer) -> None:
        groups = batch(batch_number(update))
        rows = [one for group in groups for one in group.trajectories]
        rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
        scores = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        scores = scores.flatten().float()
        with torch.no_grad():
            old, _ = self.logprobs(old_policy, np.arange(len(rows)), rows)
        for mini_batch in deal(
            len(rows), epochs=1, mini_batches=self.mini_batches, seed=SEED, update=update
        ):
            self.descend(mini_batch.rows, rows, old, scores)

    def descend(self, chosen: Any, rows: Any, old: Any, scores: Any) -> None:
        logprobs, order = self.logprobs(self.model, chosen, rows)
        tokens = sum(len(rows[row].response_ids_T) for row in order)
        losses = []
        for row in order:
            behaviour = torch.from_numpy(rows[row].logprobs_T)
            ratio = torch.exp(logprobs[row] - old[row])
            advantage = scores[row]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 0.2, 1 + 0.1))
            weight = torch.exp(old[row] - behaviour)
            if self.mode == "truncate":
                loss = weight.clamp(max=UPPER) * loss
            elif self.mode == "mask":
                loss = weight.masked_fill((weight > UPPER) | (weight < 0.8), 0.0) * loss
            losses.append(loss)
        self.optimizer.zero_grad(set_to_none=False)
        (torch.cat(losses) * (torch.ones(()) / tokens)).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()

    def logprobs(self, model: Transformer, chosen: Any, rows: Any) -> tuple[dict[int, Any], Any]:
        """Log-probabilities of the responses of ``chosen`` rows, padded into one forward pass."""
        order = sorted(chosen, key=lambda row: (len(rows[row].response_ids_T), row))
        whole = [np.concatenate([rows[r].prompt_ids_P, rows[r].response_ids_T]) for r in order]
        width = max(len(one) for one in whole) - 1
        padded = torch.zeros(len(order), width, dtype=torch.int64)
        for line, one in zip(padded, whole, strict=True):
            line[: len(one) - 1] = torch.from_numpy(one[:-1])
        places = [
            line * width + 1 + t
            for line, r in enumerate(order)
            for t in range(len(rows[r].response_ids_T))
        ]
        targets = torch.from_numpy(np.concatenate([rows[r].response_ids_T for r in order])).long()
        hidden = model(padded).flatten(0, 1)[torch.tensor(places)]
        found = torch.log_softmax(model.logits(hidden), -1).gather(1, targets[:, None])[:, 0]
        parts = found.split([len(rows[r].response_ids_T) for r in order])
        return dict(zip(order, parts, strict=True)), order


def batch_number(update: UpdateId) -> int:
    return 10 * update.global_step + update.local_update


def train(learner: LocalLearner, step: int, updates: int) -> None:
    for index in range(updates):
        update = update_id(step, index)
        learner.local_update(update, batch(batch_number(update)))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize(
    ("mini_batches", "mode"), [(1, "none"), (1, "truncate"), (2, "none"), (3, "mask")]
)
def test_equal_bit_for_bit_to_a_loop_by_hand(
    updates: int, offload: bool, mini_batches: int, mode: str
) -> None:
    importance = {"mode": mode, "upper": UPPER, "lower": 0.8 if mode == "mask" else 0.0}
    learner = make(
        updates, offload_anchor=offload, mini_batches=mini_batches, importance=importance
    )
    expected = ByHand(mini_batches, mode)
    with deterministic_math(enabled=True):
        for step in (1, 2):
            expected.step(step, updates)
    for step in (1, 2):
        train(learner, step, updates)
    assert learner.policy_digest() == digest_weights(weights_of(expected.model))
    # The comparison means something: the weights moved, and other old policies move them elsewhere.
    assert learner.policy_digest() != digest_weights(weights_of(make_model()))
    other = make(
        updates, mini_batches=mini_batches, importance=importance, old_logprobs="recompute"
    )
    for step in (1, 2):
        train(other, step, updates)
    assert (other.policy_digest() == learner.policy_digest()) is (updates == 1)


@pytest.mark.parametrize("offload", [False, True])
def test_the_anchor_stands_still_while_the_policy_moves(offload: bool) -> None:
    """Every local update moves the live weights; those of the anchor are the ones it took."""
    model = make_model()
    before = digest_weights(weights_of(model))
    anchor = PolicyAnchor(model, device=torch.device("cpu"), offload=offload)
    anchor.take(model)
    for moved in range(1, 5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        with anchor.on_device() as copy_of_it:
            assert digest_weights(weights_of(copy_of_it)) == before
            assert not any(p.requires_grad for p in copy_of_it.parameters())
        assert digest_weights(anchor.weights()) == before
        assert model.norm.weight[0].item() == 1.0 + moved
    live = {tensor.untyped_storage().data_ptr() for tensor in weights_of(model).values()}
    kept = {tensor.untyped_storage().data_ptr() for tensor in anchor.weights().values()}
    assert not live & kept
    anchor.take(model)
    assert digest_weights(anchor.weights()) == digest_weights(weights_of(model))


def test_nothing_is_lost_when_a_pass_over_the_anchor_fails() -> None:
    model = make_model()
    anchor = PolicyAnchor(model, device=torch.device("cpu"), offload=True)
    anchor.take(model)
    live, kept = digest_weights(weights_of(model)), digest_weights(anchor.weights())
    with pytest.raises(ZeroDivisionError), anchor.on_device():
        raise ZeroDivisionError
    assert digest_weights(weights_of(model)) == live
    assert digest_weights(anchor.weights()) == kept


def test_a_step_whose_first_batch_was_set_aside_is_anchored_where_it_begins() -> None:
    """As if the step had consisted of the other updates; the anchor of the step before is gone."""
    learner = make(4)
    train(learner, 1, 4)
    rest = [update_id(2, index) for index in (1, 2, 3)]
    for update in rest:
        learner.local_update(update, batch(batch_number(update)))
    expected = ByHand(1, "none")
    with deterministic_math(enabled=True):
        expected.step(1, 4)
        old_policy = copy.deepcopy(expected.model)
        for update in rest:
            expected.local_update(update, old_policy)
    assert learner.policy_digest() == digest_weights(weights_of(expected.model))
