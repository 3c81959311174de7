from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_learner, make_model, random_groups, restore, save, update_id
from torch import nn

from perdure.core.components import ComponentState
from perdure.learner.components import OptimizerComponent, WeightsComponent
from perdure.learner.config import AdamConfig
from perdure.learner.optimizer import AdamW
from perdure.models import weights_of

ADAM = AdamConfig(beta2=0.999, max_grad_norm=1e9)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))


def test_moments_survive_a_restore() -> None:
    """Ten Adam steps on gradient 1, then one on 0.01: with moments 0.910229, without 0.9."""
    model = Scalar()
    optimizer = AdamW(model)
    model.w.grad = torch.ones(1)
    for _ in range(10):
        optimizer.step(lr=0.1, adam=ADAM)
    fresh_model = Scalar()
    fresh = AdamW(fresh_model)
    OptimizerComponent("optimizer", fresh).load(OptimizerComponent("o", optimizer).state(), 1)
    fresh_model.w.grad = torch.full((1,), 0.01)
    fresh.step(lr=0.1, adam=ADAM)
    assert fresh_model.w.item() == pytest.approx(0.910229, abs=1e-5)


def test_adam_agrees_with_torch() -> None:
    adam = AdamConfig(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
    ours, theirs = make_model(), make_model()
    optimizer = AdamW(ours)
    matrices = [p for p in theirs.parameters() if p.dim() >= 2]
    vectors = [p for p in theirs.parameters() if p.dim() < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=0.1,
    )
    for step in range(3):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.full_like(a, 0.1 * (step + 1))
            b.grad = a.grad.clone()
        optimizer.step(lr=0.01, adam=adam)
        reference.step()
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_optimizer_state_has_one_shape_for_life() -> None:
    learner = make_learner()
    shapes = {k: v.shape for k, v in learner.components()["optimizer"].state().tensors.items()}
    learner.local_update(update_id(1), random_groups())
    after = learner.components()["optimizer"].state().tensors
    assert {k: v.shape for k, v in after.items()} == shapes


def test_loading_copies_and_never_aliases() -> None:
    source, target = make_model(1), make_model(2)
    pointers = {name: tensor.data_ptr() for name, tensor in weights_of(target).items()}
    state = WeightsComponent("policy", source).state()
    WeightsComponent("policy", target).load(state, 1)
    assert {name: tensor.data_ptr() for name, tensor in weights_of(target).items()} == pointers
    with torch.no_grad():
        source.embed.weight.zero_()
    assert target.embed.weight.any()


def test_read_only_arrays_are_loaded() -> None:
    model = make_model(1)
    tensors = {name: tensor.numpy().copy() for name, tensor in weights_of(make_model(2)).items()}
    for array in tensors.values():
        array.setflags(write=False)
    WeightsComponent("policy", model).load(ComponentState(tensors), 1)
    assert np.array_equal(model.embed.weight.detach().numpy(), tensors["embed.weight"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("norm.weight"), "missing .'norm.weight'.*extra nothing"),
        (lambda t: t.update(other=np.zeros(2)), "missing nothing, extra .'other'"),
        (lambda t: t.update({"norm.weight": np.ones(3, np.float32)}), "norm.weight is .*3,"),
        (lambda t: t.update({"norm.weight": np.ones(16, np.float64)}), "float64"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    model = make_model(1)
    tensors = {name: tensor.numpy().copy() for name, tensor in weights_of(make_model(2)).items()}
    damage(tensors)
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    with pytest.raises(ValueError, match=message):
        WeightsComponent("policy", model).load(ComponentState(tensors), 1)
    torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)


def test_another_schema_is_refused_by_every_component() -> None:
    learner = make_learner({"algorithm": "ppo", "kl": {"coef": 0.1}})
    components = learner.components()
    assert list(components) == [
        "policy",
        "value",
        "reference",
        "optimizer",
        "value_optimizer",
        "scheduler",
        "counters",
    ]
    for component in components.values():
        with pytest.raises(ValueError, match="schema version 2"):
            component.load(component.state(), 2)


def test_state_digest_sees_every_component() -> None:
    learner = make_learner({"algorithm": "ppo", "kl": {"coef": 0.1}})
    for step in (1, 2):
        learner.local_update(update_id(step), random_groups(seed=step))
    saved = save(learner)
    learner.local_update(update_id(3), random_groups(seed=3))
    digests = {learner.state_digest()}
    for name in [name for name in saved if name != "reference"]:
        learner.components()[name].load(*saved[name])
        digests.add(learner.state_digest())
    assert len(digests) == len(saved)
    restore(learner, saved)
    assert learner.state_digest() in digests
