"""What every component of the learner, and the learner as a whole, promises to a checkpoint."""

from __future__ import annotations

import pytest
from learner_cases import make_learner, make_model, random_groups, restore, save, update_id

from perdure.core.components import Checkpointable, ComponentState
from perdure.learner.api import Learner
from perdure.models.digest import as_array

SETTINGS = {"algorithm": "ppo", "kl": {"coef": 0.1}, "mini_batches": 2, "lr": 1e-2}
NAMES = [
    "policy",
    "value",
    "reference",
    "optimizer",
    "value_optimizer",
    "scheduler",
    "counters",
]


def make(seed: int = 1) -> Learner:
    return make_learner(SETTINGS, model=make_model(seed))


def advance(learner: Learner) -> None:
    learner.local_update(update_id(1), random_groups())
    learner.freeze_reference()


def plain(component: Checkpointable) -> tuple[dict[str, bytes], dict[str, object]]:
    state = component.state()
    tensors = {name: as_array(tensor).tobytes() for name, tensor in state.tensors.items()}
    return tensors, dict(state.values)


@pytest.mark.parametrize("name", NAMES)
def test_load_undoes_what_training_did(name: str) -> None:
    learner = make()
    before, saved = plain(learner.components()[name]), save(learner)
    advance(learner)
    assert plain(learner.components()[name]) != before
    learner.components()[name].load(*saved[name])
    assert plain(learner.components()[name]) == before


@pytest.mark.parametrize("name", NAMES)
def test_what_was_loaded_may_be_thrown_away(name: str) -> None:
    source, target = make(), make(seed=2)
    advance(source)
    saved = save(source)
    component = target.components()[name]
    component.load(*saved[name])
    before = plain(component)
    for array in saved[name][0].tensors.values():
        array[...] = 0
    assert plain(component) == before


@pytest.mark.parametrize("name", NAMES)
def test_an_incomplete_state_is_refused_and_changes_nothing(name: str) -> None:
    learner = make()
    component = learner.components()[name]
    state, version = save(learner)[name]
    tensors, values = dict(state.tensors), dict(state.values)
    (tensors or values).popitem()
    before = plain(component)
    with pytest.raises(ValueError, match=name):
        component.load(ComponentState(tensors, values), version)
    assert plain(component) == before


def test_a_learner_restored_by_its_components_is_the_same_learner() -> None:
    source, target = make(), make(seed=2)
    advance(source)
    restore(target, save(source))
    assert list(target.components()) == NAMES
    for learner in (source, target):
        learner.local_update(update_id(2), random_groups(seed=2))
    assert target.state_digest() == source.state_digest()
    assert target.policy_digest() == source.policy_digest()
    assert target.reference_digest() == source.reference_digest()
    assert (target.optimizer_step, target.local_updates) == (4, 2)


def test_reading_digests_and_states_changes_nothing() -> None:
    learner = make()
    advance(learner)
    first = (learner.state_digest(), learner.policy_digest())
    learner.components()
    assert (learner.state_digest(), learner.policy_digest()) == first
