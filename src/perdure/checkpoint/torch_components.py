"""Ready-made components for torch: modules, optimizers, schedulers, random number generators.

All of them restore in place: the parameters an optimizer refers to, the dictionaries a scheduler
refers to stay the same objects. Devices are never part of the state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from perdure.core.components import ComponentState

_TENSOR = "$tensor"
"""Key of the one-entry mapping that stands for a tensor inside small values."""


class ModuleComponent:
    """Parameters and persistent buffers of a module, by their names in ``state_dict()``."""

    schema_version = 1

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state(self) -> ComponentState:
        return ComponentState(tensors=self._tensors())

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Copy every tensor into the live one of its name.

        Raises:
            ValueError: Names, shapes or types differ; nothing was changed.
        """
        _expect(schema_version, self.schema_version)
        live = self._tensors()
        stored = {name: _as_tensor(value) for name, value in state.tensors.items()}
        _expect_names(live.keys(), stored.keys())
        for name, tensor in stored.items():
            _expect_like(name, live[name], tensor)
        with torch.no_grad():
            for name, tensor in stored.items():
                live[name].copy_(tensor)

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Parameters and buffers that have the shapes."""
        live = self._tensors()
        return {n: live[n] for n, s in shapes.items() if n in live and tuple(live[n].shape) == s}

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{name} of the module is a {type(value).__name__}, not a tensor")
            tensors[name] = value.detach()
        return tensors


class OptimizerComponent:
    """State and hyper-parameters of an optimizer, keyed by the names of a module's parameters.

    Tensors are ``state/<parameter>/<key>`` and ``groups/<index>/hyper/<key>``; everything else is
    in the small values. A restored optimizer keeps its parameters, groups and state tensors.

    Args:
        optimizer: The live optimizer.
        module: Holds every parameter the optimizer updates.
    """

    schema_version = 1

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module

    def state(self) -> ComponentState:
        names = self._names()
        entries = {names[id(p)]: dict(held) for p, held in self._optimizer.state.items()}
        groups = [
            {
                "params": [names[id(parameter)] for parameter in group["params"]],
                "hyper": {key: value for key, value in group.items() if key != "params"},
            }
            for group in self._optimizer.param_groups
        ]
        tensors: dict[str, Any] = {}
        values = {
            "class": type(self._optimizer).__name__,
            "groups": _split(groups, "groups", tensors),
            "state": _split(entries, "state", tensors),
        }
        return ComponentState(tensors=tensors, values=values)

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take state and hyper-parameters over.

        Raises:
            ValueError: Another class, groups or parameters, or a state tensor that does not fit.
        """
        _expect(schema_version, self.schema_version)
        _expect_class(self._optimizer, state)
        stored = _join(state.values, state.tensors)
        names = self._names()
        groups = self._optimizer.param_groups
        members = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
        if members != [group["params"] for group in stored["groups"]]:
            raise ValueError("the parameter groups hold other parameters, or in another order")
        for group, stored_group in zip(groups, stored["groups"], strict=True):
            for key, value in stored_group["hyper"].items():
                group[key] = _taken_over(key, group.get(key), value)
            for parameter in group["params"]:
                self._load_parameter(parameter, stored["state"].get(names[id(parameter)]), group)

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """State tensors that have the shapes; a parameter stands for state it does not have yet."""
        names = self._names()
        held = {
            f"state/{names[id(parameter)]}": parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        found: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            path, _, key = name.rpartition("/")
            if path in held:
                live = self._optimizer.state.get(held[path], {}).get(key, held[path])
                if isinstance(live, torch.Tensor) and tuple(live.shape) == shape:
                    found[name] = live.detach()
        return found

    def _load_parameter(
        self, parameter: torch.Tensor, stored: dict[str, Any] | None, group: Mapping[str, Any]
    ) -> None:
        if stored is None:
            self._optimizer.state.pop(parameter, None)
            return
        live = self._optimizer.state[parameter]
        for key in live.keys() - stored.keys():
            del live[key]
        for key, value in stored.items():
            # Where torch itself keeps the step count decides which of its kernels may run.
            on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
            device = torch.device("cpu") if on_host else parameter.device
            live[key] = _taken_over(key, live.get(key), _moved(value, device))

    def _names(self) -> dict[int, str]:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for index, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ValueError(f"parameter {place} of group {index} is not in the module")
        return names


class SchedulerComponent:
    """State of a learning-rate scheduler. Functions it was built with are not part of it."""

    schema_version = 1

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self._scheduler = scheduler

    def state(self) -> ComponentState:
        tensors: dict[str, Any] = {}
        held = _split(self._scheduler.state_dict(), "state", tensors)
        values = {"class": type(self._scheduler).__name__, "state": held}
        return ComponentState(tensors=tensors, values=values)

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the counters and bounds over.

        What this version of torch keeps and the stored state does not know stays as it is.

        Raises:
            ValueError: The stored scheduler is of another class.
        """
        _expect(schema_version, self.schema_version)
        _expect_class(self._scheduler, state)
        stored = _join(state.values["state"], state.tensors)
        live = self._scheduler.state_dict()
        self._scheduler.load_state_dict(
            {key: _taken_over(key, live.get(key), value) for key, value in stored.items()}
        )


class RngComponent:
    """The global generators of python, numpy and torch (all CUDA devices included).

    On a machine with fewer devices than were saved the surplus states have no place and are left;
    devices beyond the saved ones keep their own state.
    """

    schema_version = 1

    def state(self) -> ComponentState:
        version, internal, gauss_next = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
        tensors: dict[str, Any] = {
            "python": np.array(internal, dtype=np.uint32),
            "numpy": np.asarray(keys),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            for index, state in enumerate(torch.cuda.get_rng_state_all()):
                tensors[f"cuda/{index}"] = state
        return ComponentState(
            tensors=tensors,
            values={
                "python": [version, gauss_next],
                "numpy": [str(name), int(position), int(has_gauss), float(cached)],
            },
        )

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Set all generators.

        Raises:
            ValueError: A state is missing, or a generator refuses it.
        """
        _expect(schema_version, self.schema_version)
        tensors, values = state.tensors, state.values
        missing = {"python", "numpy", "torch"} - tensors.keys()
        if missing:
            raise ValueError(f"no state of {', '.join(sorted(missing))}")
        version, gauss_next = values["python"]
        random.setstate((version, tuple(int(word) for word in tensors["python"]), gauss_next))
        name, position, has_gauss, cached = values["numpy"]
        np.random.set_state((name, tensors["numpy"], position, has_gauss, cached))  # noqa: NPY002
        torch.set_rng_state(_as_tensor(tensors["torch"]))
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if f"cuda/{index}" in tensors:
                torch.cuda.set_rng_state(_as_tensor(tensors[f"cuda/{index}"]), index)


def _split(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """``value`` with every tensor moved to ``tensors`` and its place named instead."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: _split(item, f"{path}/{key}", tensors) for key, item in items}
    if isinstance(value, list | tuple):
        held = cast("Sequence[Any]", value)
        return [_split(item, f"{path}/{index}", tensors) for index, item in enumerate(held)]
    return value


def _join(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo :func:`_split`."""
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        if set(mapping) != {_TENSOR}:
            return {key: _join(item, tensors) for key, item in mapping.items()}
        if mapping[_TENSOR] not in tensors:
            raise ValueError(f"tensor {mapping[_TENSOR]} is missing")
        return _as_tensor(tensors[mapping[_TENSOR]])
    if isinstance(value, list):
        return [_join(item, tensors) for item in cast("list[Any]", value)]
    return value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(item, device) for item in cast("list[Any]", value)]
    return value


def _taken_over(key: str, live: Any, stored: Any) -> Any:
    """``stored`` in the type of ``live``: into the same tensor, a tuple for a tuple, and so on."""
    if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor):
        _expect_like(key, live, stored)
        with torch.no_grad():
            return live.copy_(stored)
    if isinstance(live, tuple) and isinstance(stored, list):
        return tuple(cast("list[Any]", stored))
    if isinstance(live, Counter):
        return Counter(cast("dict[Any, int]", stored))
    return stored


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))


def _expect(stored: int, live: int) -> None:
    if stored != live:
        raise ValueError(f"schema version {stored}, expected {live}")


def _expect_class(live: object, state: ComponentState) -> None:
    if state.values["class"] != type(live).__name__:
        raise ValueError(f"of class {state.values['class']}, expected {type(live).__name__}")


def _expect_names(live: Any, stored: Any) -> None:
    missing, extra = sorted(live - stored), sorted(stored - live)
    if missing or extra:
        raise ValueError(f"missing {missing[:5]}, unexpected {extra[:5]}")


def _expect_like(name: str, live: torch.Tensor, stored: torch.Tensor) -> None:
    if live.shape != stored.shape or live.dtype != stored.dtype:
        raise ValueError(
            f"{name} is {tuple(stored.shape)} {stored.dtype}, "
            f"expected {tuple(live.shape)} {live.dtype}"
        )
