"""The learner's state as checkpoint components: strict about names, shapes and types, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perdure.core.components import Checkpointable, ComponentState
from perdure.core.digests import digest_arrays, digest_values
from perdure.learner.optimizer import AdamW
from perdure.learner.schedule import LearningRate
from perdure.models.digest import as_array, weights_of


def load_tensors(what: str, live: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Copy ``saved`` (torch or numpy) into ``live``, all of it or nothing.

    Raises:
        ValueError: A name is missing or extra, or a shape or dtype differs.
    """
    missing, extra = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
    if missing or extra:
        raise ValueError(f"{what}: missing {missing or 'nothing'}, extra {extra or 'nothing'}")
    incoming = {name: _as_tensor(value) for name, value in saved.items()}
    for name, tensor in live.items():
        found = incoming[name]
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise ValueError(
                f"{what}: {name} is {found.dtype} {tuple(found.shape)} in the saved state,"
                f" {tensor.dtype} {tuple(tensor.shape)} here"
            )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(incoming[name])


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy every weight that ``target`` has; a critic's trunk lacks the output layer."""
    weights = weights_of(source)
    with torch.no_grad():
        for name, parameter in weights_of(target).items():
            parameter.copy_(weights[name])


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(np.array(value))


def _check_values(what: str, saved: Mapping[str, Any], expected: set[str]) -> None:
    if set(saved) != expected:
        raise ValueError(f"{what}: fields {sorted(saved)} instead of {sorted(expected)}")


def _check_schema(what: str, found: int, known: int) -> None:
    if found != known:
        raise ValueError(f"{what}: schema version {found}; this version reads {known}")


class WeightsComponent:
    """The parameters of a model."""

    schema_version = 1

    def __init__(self, name: str, model: nn.Module) -> None:
        self._name = name
        self._model = model

    def state(self) -> ComponentState:
        return ComponentState(tensors=weights_of(self._model))

    def load(self, state: ComponentState, schema_version: int) -> None:
        _check_schema(self._name, schema_version, self.schema_version)
        _check_values(self._name, state.values, set())
        load_tensors(self._name, weights_of(self._model), state.tensors)


class OptimizerComponent:
    """Moments and step counts, by parameter name."""

    schema_version = 1

    def __init__(self, name: str, optimizer: AdamW) -> None:
        self._name = name
        self._optimizer = optimizer

    def state(self) -> ComponentState:
        return ComponentState(tensors=self._optimizer.state())

    def load(self, state: ComponentState, schema_version: int) -> None:
        _check_schema(self._name, schema_version, self.schema_version)
        _check_values(self._name, state.values, set())
        load_tensors(self._name, self._optimizer.state(), state.tensors)


class ScheduleComponent:
    """Position in the learning-rate schedule and the schedule itself.

    A saved schedule that differs from the configured one is refused: a position says nothing on
    another curve.
    """

    schema_version = 1

    def __init__(self, rate: LearningRate) -> None:
        self._rate = rate

    def state(self) -> ComponentState:
        return ComponentState(values={**self._definition(), "position": self._rate.position})

    def load(self, state: ComponentState, schema_version: int) -> None:
        _check_schema("scheduler", schema_version, self.schema_version)
        definition = self._definition()
        _check_values("scheduler", state.values, {*definition, "position"})
        for field, configured in definition.items():
            if state.values[field] != configured:
                raise ValueError(
                    f"scheduler: {field} is {state.values[field]!r} in the saved state,"
                    f" {configured!r} in the configuration"
                )
        self._rate.position = int(state.values["position"])

    def _definition(self) -> dict[str, Any]:
        return {**self._rate.config.model_dump(mode="json"), "horizon": self._rate.horizon}


@dataclass(slots=True)
class Counters:
    """The learner's own clocks."""

    training: bool = False
    """False during the warm start."""
    supervised_steps: int = 0
    optimizer_steps: int = 0
    value_optimizer_steps: int = 0


class CountersComponent:
    """The counters, loaded into the same object."""

    schema_version = 1

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def state(self) -> ComponentState:
        counters = self._counters
        return ComponentState(
            values={
                "training": counters.training,
                "supervised_steps": counters.supervised_steps,
                "optimizer_steps": counters.optimizer_steps,
                "value_optimizer_steps": counters.value_optimizer_steps,
            }
        )

    def load(self, state: ComponentState, schema_version: int) -> None:
        _check_schema("counters", schema_version, self.schema_version)
        _check_values("counters", state.values, set(self.state().values))
        self._counters.training = bool(state.values["training"])
        self._counters.supervised_steps = int(state.values["supervised_steps"])
        self._counters.optimizer_steps = int(state.values["optimizer_steps"])
        self._counters.value_optimizer_steps = int(state.values["value_optimizer_steps"])


def digest_components(components: Mapping[str, Checkpointable]) -> str:
    """One digest over every component's logical tensors and values."""
    states = {name: component.state() for name, component in components.items()}
    arrays = {
        f"{name}/{key}": as_array(tensor)
        for name, state in states.items()
        for key, tensor in state.tensors.items()
    }
    values = {name: dict(state.values) for name, state in states.items()}
    return digest_values({"tensors": digest_arrays(arrays), "values": values})
