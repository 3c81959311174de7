"""Ready-made components for torch: modules, optimizers, schedulers, random number generators.

All of them restore in place: the parameters an optimizer refers to, the dictionaries a scheduler
refers to stay the same objects. Devices are never part of the state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from perdure.core.components import ComponentState


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

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{name} of the module is a {type(value).__name__}, not a tensor")
            tensors[name] = value.detach()
        return tensors


class OptimizerComponent:
    """State and hyper-parameters of an optimizer, keyed by the names of a module's parameters.

    Tensors are ``state/<parameter>/<key>`` and ``group/<index>/<key>``; everything else is in the
    small values. A restored optimizer keeps its group dictionaries and parameter objects.

    Args:
        optimizer: The live optimizer.
        module: Holds every parameter the optimizer updates.
    """

    schema_version = 1

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module

    def state(self) -> ComponentState:
        tensors: dict[str, Any] = {}
        values: dict[str, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        names = self._names()
        for index, group in enumerate(self._optimizer.param_groups):
            hyper = {key: value for key, value in group.items() if key != "params"}
            plain = _split(hyper, f"group/{index}", tensors)
            members = [names[id(parameter)] for parameter in group["params"]]
            groups.append({"params": members, "hyper": plain})
            for name, parameter in zip(members, group["params"], strict=True):
                if parameter in self._optimizer.state:
                    entries = self._optimizer.state[parameter]
                    values[name] = _split(entries, f"state/{name}", tensors)
        return ComponentState(tensors=tensors, values={"groups": groups, "state": values})

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take state and hyper-parameters over.

        Raises:
            ValueError: Groups or parameters differ, or a state tensor does not fit.
        """
        _expect(schema_version, self.schema_version)
        groups = self._optimizer.param_groups
        stored_groups = state.values["groups"]
        names = self._names()
        members = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
        if members != [group["params"] for group in stored_groups]:
            raise ValueError("the parameter groups hold other parameters, or in another order")
        entries = {name: dict(plain) for name, plain in state.values["state"].items()}
        hypers = [dict(group["hyper"]) for group in stored_groups]
        for path, value in state.tensors.items():
            kind, rest = path.split("/", 1)
            owner, key = rest.rsplit("/", 1)
            target = entries[owner] if kind == "state" else hypers[int(owner)]
            target[key] = _as_tensor(value)
        for group, hyper in zip(groups, hypers, strict=True):
            for key, value in hyper.items():
                group[key] = _taken_over(group.get(key), value)
            for parameter in group["params"]:
                self._load_parameter(parameter, entries.get(names[id(parameter)]), group)

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
            if isinstance(value, torch.Tensor) and not isinstance(live.get(key), torch.Tensor):
                on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
                live[key] = value.to(torch.device("cpu") if on_host else parameter.device)
            else:
                live[key] = _taken_over(live.get(key), value)

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
        return ComponentState(values=dict(self._scheduler.state_dict()))

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the counters and bounds over.

        Raises:
            ValueError: Other names than the live scheduler's.
        """
        _expect(schema_version, self.schema_version)
        live = self._scheduler.state_dict()
        _expect_names(live.keys(), state.values.keys())
        self._scheduler.load_state_dict(
            {key: _taken_over(live[key], value) for key, value in state.values.items()}
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


def _split(mixed: Mapping[str, Any], prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Move the tensors of ``mixed`` to ``tensors`` under ``prefix``; return the rest."""
    plain: dict[str, Any] = {}
    for key, value in mixed.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{prefix}/{key}"] = value.detach()
        else:
            plain[key] = value
    return plain


def _taken_over(live: Any, stored: Any) -> Any:
    """``stored`` in the type of ``live``: into the same tensor, a tuple for a tuple, and so on."""
    if isinstance(live, torch.Tensor):
        if not isinstance(stored, torch.Tensor):
            raise ValueError("a tensor was stored as a plain value")
        _expect_like("state tensor", live, stored)
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
