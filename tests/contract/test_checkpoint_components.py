"""One contract for everything a checkpoint stores (``core.components.Checkpointable``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    MemoryLedger,
    Registry,
    StagedInfo,
    ValuesComponent,
)
from perdure.checkpoint.torch_components import (
    ModuleComponent,
    OptimizerComponent,
    RngComponent,
    SchedulerComponent,
)
from perdure.core.clock import ManualClock
from perdure.core.components import Checkpointable, ComponentState
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import MemoryStorage

ONE = IncarnationNumber(1)


@dataclass(frozen=True, slots=True)
class Subject:
    """A component and a way to change what it holds."""

    component: Checkpointable
    change: Callable[[], object]


def _values() -> Subject:
    values: dict[str, Any] = {"n": 1, "coefficient": 0.1}
    return Subject(ValuesComponent(values), lambda: values.update(n=values["n"] + 1))


def _arrays() -> Subject:
    arrays = {"mean": np.arange(3.0)}
    return Subject(ArraysComponent(arrays), lambda: arrays["mean"].__iadd__(1))


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    train()
    return module, optimizer, train


def _module() -> Subject:
    module, _, train = _trained()
    return Subject(ModuleComponent(module), train)


def _optimizer() -> Subject:
    module, optimizer, train = _trained()
    return Subject(OptimizerComponent(optimizer, module), train)


def _scheduler() -> Subject:
    _, optimizer, train = _trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def change() -> None:
        train()
        scheduler.step()

    return Subject(SchedulerComponent(scheduler), change)


def _rng() -> Subject:
    return Subject(RngComponent(), lambda: torch.rand(1))


SUBJECTS = {
    "values": _values,
    "arrays": _arrays,
    "module": _module,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "rng": _rng,
}


@pytest.fixture(params=sorted(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


def frozen(state: ComponentState) -> tuple[dict[str, bytes], Any]:
    tensors = {name: np.asarray(tensor).tobytes() for name, tensor in state.tensors.items()}
    return tensors, copy.deepcopy(dict(state.values))


def owned(state: ComponentState) -> ComponentState:
    tensors = {name: np.array(np.asarray(tensor)) for name, tensor in state.tensors.items()}
    return ComponentState(tensors, copy.deepcopy(dict(state.values)))


def test_load_undoes_every_change(subject: Subject) -> None:
    saved = owned(subject.component.state())
    before = frozen(saved)
    subject.change()
    assert frozen(subject.component.state()) != before
    subject.component.load(saved, subject.component.schema_version)
    assert frozen(subject.component.state()) == before


def test_loading_copies(subject: Subject) -> None:
    saved = owned(subject.component.state())
    subject.component.load(saved, subject.component.schema_version)
    expected = frozen(subject.component.state())
    for tensor in saved.tensors.values():
        tensor.fill(0)
    assert frozen(subject.component.state()) == expected
    subject.change()
    assert all(not np.any(tensor) for tensor in saved.tensors.values())


def test_reading_the_state_changes_nothing(subject: Subject) -> None:
    assert frozen(subject.component.state()) == frozen(subject.component.state())


def test_another_schema_version_is_refused(subject: Subject) -> None:
    saved = owned(subject.component.state())
    with pytest.raises(ValueError, match="schema version"):
        subject.component.load(saved, subject.component.schema_version + 1)


def test_a_missing_tensor_is_refused(subject: Subject) -> None:
    saved = owned(subject.component.state())
    if not saved.tensors:
        values = {key: value for key, value in saved.values.items() if key != "n"}
        saved = ComponentState({}, values | {"class": "Other"})
    else:
        saved = ComponentState(dict(list(saved.tensors.items())[1:]), saved.values)
    with pytest.raises(ValueError, match=r"missing|differ|no state of|expected"):
        subject.component.load(saved, subject.component.schema_version)


def test_the_engine_brings_it_back(subject: Subject) -> None:
    registry = Registry()
    registry.register("subject", subject.component, kind="tensors")
    ledger = MemoryLedger()
    engine = Checkpointer(
        MemoryStorage(),
        registry=registry,
        ledger=ledger,
        clock=ManualClock(),
        faults=NoFaults(),
        events=ignore_events,
    )
    info = StagedInfo(LogPosition(ONE, 0, 0), {}, {}, "ppo", "", "")
    engine.stage(CheckpointName("train", 1, ONE), info=info, must=True)
    before = frozen(subject.component.state())
    subject.change()
    engine.restore(engine.choose(ledger.committed()))
    assert frozen(subject.component.state()) == before
    engine.close()
