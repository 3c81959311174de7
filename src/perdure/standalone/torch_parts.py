"""What a script holds of torch: modules, parameters, optimizers, schedules, scalers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from perdure.checkpoint.torch_components import (
    ModuleComponent,
    OptimizerComponent,
    RngComponent,
    SchedulerComponent,
)
from perdure.core.components import Checkpointable, ComponentState
from perdure.core.errors import ConfigError, DamagedError
from perdure.standalone import tree

SETTINGS = frozenset(
    (
        "total_iters",
        "total_steps",
        "T_max",
        "T_0",
        "T_mult",
        "milestones",
        "_milestones",
        "step_size",
        "gamma",
        "start_factor",
        "end_factor",
        "factor",
        "factors",
        "power",
        "eta_min",
        "base_lrs",
        "max_lrs",
        "min_lrs",
        "patience",
        "threshold",
        "threshold_mode",
        "cooldown",
        "mode",
        "anneal_strategy",
        "div_factor",
        "final_div_factor",
        "step_size_up",
    )
)
"""What a script sets when it builds a schedule; everything else in its state moves."""


class ParameterNames:
    """The names of all parameters of several modules, for the optimizers that update them."""

    def __init__(self, named: Mapping[str, object]) -> None:
        self._named = named

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter once, under ``<module>/<its name there>``."""
        seen: set[int] = set()
        for name, held in self._named.items():
            for path, tensor in _parameters(name, held):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield path, tensor


class OptimizerPart:
    """An optimizer; ``keep_settings``: the hyper-parameters of this script win."""

    schema_version = OptimizerComponent.schema_version

    def __init__(
        self, live: torch.optim.Optimizer, names: ParameterNames, *, keep_settings: bool
    ) -> None:
        # Asked for nothing but the names of parameters.
        self._inner = OptimizerComponent(live, cast("torch.nn.Module", names))
        self._live = live
        self._names = names
        self._keep_settings = keep_settings

    def state(self) -> ComponentState:
        """Raises ``ConfigError``: it updates a parameter that was not registered."""
        known = {id(tensor) for _, tensor in self._names.named_parameters()}
        for index, group in enumerate(self._live.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise _without_name(place, index, parameter)
        return self._inner.state()

    def load(self, state: ComponentState, schema_version: int) -> None:
        """As the inner component does. Raises ``ValueError`` if the state does not fit."""
        before = [_settings_of(group) for group in self._live.param_groups]
        self._inner.load(state, schema_version)
        if self._keep_settings:
            for group, settings in zip(self._live.param_groups, before, strict=True):
                group.update(settings)

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, torch.Tensor]:
        """As the inner component does."""
        return self._inner.live_tensors(shapes)


class SchedulePart:
    """A learning-rate schedule. Its horizon and the other settings must be the stored ones.

    Args:
        live: The schedule.
        keep_settings: Those of this script win instead of being compared.
    """

    schema_version = SchedulerComponent.schema_version

    def __init__(self, live: LRScheduler, *, keep_settings: bool) -> None:
        self._live = live
        self._inner = SchedulerComponent(live)
        self._keep_settings = keep_settings

    def state(self) -> ComponentState:
        return self._inner.state()

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the counters over.

        Raises:
            ValueError: Another class or another setting, a horizon above all; a function that
                gives another rate than the stored one for the same step.
        """
        before = self._inner.state().values["state"]
        stored = state.values["state"]
        if self._keep_settings:
            stored = _with_settings(stored, before)
            values = {**state.values, "state": stored}
            self._inner.load(ComponentState(state.tensors, values), schema_version)
            return
        changed = list(_changed_settings(stored, before))
        if changed:
            raise ValueError(", ".join(changed))
        self._inner.load(state, schema_version)
        if isinstance(self._live, LambdaLR):
            _require_same_function(self._live)


class ScalerPart:
    """A gradient scaler: its scale and its growth counter."""

    schema_version = 1

    def __init__(self, live: torch.amp.GradScaler) -> None:
        self._live = live

    def state(self) -> ComponentState:
        return ComponentState(values={"state": dict(self._live.state_dict())})

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Raises ``ValueError``: one of the two is switched off."""
        del schema_version
        stored = dict(state.values["state"])
        if bool(stored) != self._live.is_enabled():
            raise ValueError("the scaler is switched on in one of the two and off in the other")
        if stored:
            self._live.load_state_dict(stored)


def component_of(
    value: object, *, names: ParameterNames, keep_settings: bool
) -> tuple[Checkpointable, str] | None:
    """The component and the kind of something of torch; None if it is something else."""
    if isinstance(value, torch.nn.Module):
        # A compiled module is a shell around the one that a script without it would have.
        inner = getattr(value, "_orig_mod", value)
        return ModuleComponent(cast("torch.nn.Module", inner)), "model"
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerPart(value, names, keep_settings=keep_settings), "optimizer"
    if isinstance(value, LRScheduler):
        return SchedulePart(value, keep_settings=keep_settings), "scheduler"
    if isinstance(value, torch.amp.GradScaler):
        return ScalerPart(value), "values"
    return None


def global_generators() -> Checkpointable:
    """The global generators of python, numpy and torch, of all devices."""
    return RngComponent()


def require_finite(named: Mapping[str, object]) -> None:
    """Raise ``DamagedError`` if a restored parameter is not a number."""
    broken = [
        path
        for name, held in named.items()
        for path, tensor in _parameters(name, held)
        if tensor.is_floating_point() and bool(tree.local(tensor).isnan().any())
    ]
    if broken:
        raise DamagedError(
            f"parameters are not numbers: {', '.join(broken[:3])}",
            where="restored checkpoint",
            rule="training goes on from finite weights only",
            way_out="move this checkpoint's directory away: the one before is used",
        )


def rate_mismatches(named: Mapping[str, object]) -> list[str]:
    """Schedules whose last rate is not the one their optimizer has."""
    found: list[str] = []
    for name, held in named.items():
        if not isinstance(held, LRScheduler):
            continue
        said = [float(rate) for rate in getattr(held, "_last_lr", [])]
        used = [float(group["lr"]) for group in held.optimizer.param_groups]
        if said and said != used:
            found.append(f"{name} says the rates are {said}, its optimizer has {used}")
    return found


def _parameters(name: str, held: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(held, torch.nn.Module):
        inner = cast("torch.nn.Module", getattr(held, "_orig_mod", held))
        for path, parameter in inner.named_parameters():
            yield f"{name}/{path}", parameter
    elif isinstance(held, torch.Tensor):
        yield name, held
    elif isinstance(held, dict):
        for key, item in cast("dict[Any, object]", held).items():
            if isinstance(item, torch.Tensor):
                yield f"{name}/{key}", item


def _without_name(place: int, group: int, parameter: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"parameter {place} of group {group}, of shape {tuple(parameter.shape)}, has no name",
        where="optimizer",
        rule="the state of an optimizer is stored under the names of the parameters it updates",
        way_out="register the module that holds it, or the parameter itself",
    )


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What the script chose; a rate that a schedule moves is not among it."""
    moved = {"params", "initial_lr"} | ({"lr"} if "initial_lr" in group else set())
    return {key: value for key, value in group.items() if key not in moved}


def _changed_settings(stored: Any, live: Any, path: str = "") -> Iterator[str]:
    if isinstance(stored, Mapping) and isinstance(live, Mapping):
        for key in stored.keys() & live.keys():
            place = f"{path}/{key}" if path else str(key)
            if key in SETTINGS:
                if tree.differences(stored[key], live[key]):
                    yield f"{place} is {live[key]} here and was {stored[key]}"
            else:
                yield from _changed_settings(stored[key], live[key], place)
    elif isinstance(stored, Sequence) and isinstance(live, Sequence) and not isinstance(live, str):
        for index, (one, other) in enumerate(zip(stored, live, strict=False)):
            yield from _changed_settings(one, other, f"{path}/{index}")


def _with_settings(stored: Any, live: Any) -> Any:
    """``stored`` with the settings of ``live``."""
    if isinstance(stored, Mapping) and isinstance(live, Mapping):
        return {
            key: live[key]
            if key in SETTINGS and key in live
            else _with_settings(item, live.get(key))
            for key, item in stored.items()
        }
    if isinstance(stored, list) and isinstance(live, list):
        pairs = zip(cast("list[Any]", stored), cast("list[Any]", live), strict=False)
        return [_with_settings(one, other) for one, other in pairs]
    return stored


def _require_same_function(schedule: LambdaLR) -> None:
    """The functions are not stored, so the rate they give for the restored step must be."""
    functions = cast("list[Callable[[int], float]]", schedule.lr_lambdas)
    bases = cast("list[float]", schedule.base_lrs)
    step = schedule.last_epoch
    given = [float(base * function(step)) for base, function in zip(bases, functions, strict=True)]
    stored = [float(rate) for rate in schedule.get_last_lr()]
    if given != stored:
        raise ValueError(
            f"at step {step} its function gives the rates {given}, the checkpoint has {stored}:"
            " another horizon, or another function"
        )
