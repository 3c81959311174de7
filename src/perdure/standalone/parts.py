"""Components for what a script is made of, and the check that loading did what it should."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from perdure.core.components import (
    Checkpointable,
    ComponentState,
    Segment,
    Segmented,
    Spread,
    Versioned,
)
from perdure.core.errors import ConfigError, PerdureError
from perdure.standalone import refusals, tree

_SHOWN = 3
"""Differences that a message lists."""


@dataclass(frozen=True, slots=True)
class Part:
    """A component whose every failure names it, and whose state is compared after loading.

    Attributes:
        exact: After loading, the state must be the stored one. Off for parts whose settings the
            script is allowed to change, and for parts that say so.
        converts: Whether the component converts older schema versions by itself.
    """

    name: str
    component: Checkpointable
    exact: bool = True
    converts: bool = False

    @property
    def schema_version(self) -> int:
        return self.component.schema_version

    def state(self) -> ComponentState:
        """Raises ``ConfigError``: the state holds something a checkpoint cannot store."""
        try:
            return self.component.state()
        except PerdureError:
            raise
        except Exception as error:
            raise ConfigError(
                f"cannot be saved: {_text(error)}",
                where=f"component {self.name}",
                rule=f"a checkpoint stores {tree.DATA}; nothing is pickled",
                way_out="register the plain parts of it, or give it schema_version, state() and"
                " load() (docs/checkpoint.md)",
            ) from error

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the state over and make sure that it has arrived.

        Raises:
            ConfigError: The component refused it, or holds something else afterwards.
        """
        if schema_version != self.schema_version and not self.converts:
            raise self._refused(f"has schema version {schema_version}, not {self.schema_version}")
        try:
            self.component.load(state, schema_version)
        except PerdureError:
            raise
        except Exception as error:
            raise self._refused(f"does not fit: {_text(error)}") from error
        if self.exact and schema_version == self.schema_version:
            self._require_equal(state)

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """Of a component that may be spread over ranks: how its tensors lie."""
        component = self.component
        return component.live_tensors(shapes) if isinstance(component, Spread) else {}

    def _require_equal(self, stored: ComponentState) -> None:
        live = self.state()
        # The surplus generators of a machine with more devices have no place here.
        tensors = {k: v for k, v in stored.tensors.items() if not k.startswith("cuda/")}
        found = tree.differences(tensors, live.tensors)
        found += tree.differences(stored.values, live.values)
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ConfigError(
                f"is not what was stored: {', '.join(found[:_SHOWN])}{more}",
                where=f"component {self.name} after loading",
                rule="a part that cannot take its state back is not restored, whatever it says",
                way_out="mend its load(), or add(…, exact=False) if the difference is meant",
            )

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"the stored state {what}",
            where=f"component {self.name}",
            rule="a script goes on with the parts and settings it was started with",
            way_out=f"undo the change, or allow it: accept_changes=[{self.name!r}]",
        )


class VersionedPart(Part):
    """A part that says when it changes, so that no torn copy of it is saved."""

    @property
    def state_version(self) -> int:
        return cast("Versioned", self.component).state_version


class SegmentedPart(Part):
    """A part whose rows are stored as segments; it checks them itself, as they are used."""

    def segments(self) -> Sequence[Segment]:
        return cast("Segmented", self.component).segments()

    def sealed(self) -> Sequence[Segment]:
        return cast("Segmented", self.component).sealed()

    def load_segments(self, segments: Sequence[Segment] | None) -> None:
        """Raises ``ValueError``: they do not fit the loaded state."""
        cast("Segmented", self.component).load_segments(segments)


def part_of(
    name: str, component: Checkpointable, *, exact: bool = True, converts: bool = False
) -> Part:
    """The part around a component."""
    if isinstance(component, Segmented):
        # Its state is whole only after its rows were loaded.
        return SegmentedPart(name, component, exact=False, converts=converts)
    kind = VersionedPart if isinstance(component, Versioned) else Part
    return kind(name, component, exact, converts)


class DataPart:
    """Plain data that changes in place: a dictionary, a list, a deque, an array or a tensor."""

    def __init__(self, live: Any, *, schema_version: int = 1) -> None:
        self._live = live
        self._schema_version = schema_version

    @property
    def schema_version(self) -> int:
        return self._schema_version

    def state(self) -> ComponentState:
        tensors: dict[str, Any] = {}
        return ComponentState(tensors, {"data": tree.split(self._live, tensors)})

    def load(self, state: ComponentState, schema_version: int) -> None:
        del schema_version
        tree.taken_over(self._live, tree.join(state.values["data"], state.tensors))

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The tensors at the places of the stored ones, where they have the same shape."""
        return _with_shapes(self.state().tensors, shapes)


class Stateful(Protocol):
    """An object with the two methods that torch made customary."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class StatefulPart:
    """An object with ``state_dict`` and ``load_state_dict`` that deal in plain data."""

    def __init__(self, live: Stateful, *, schema_version: int = 1) -> None:
        self._live = live
        self._schema_version = schema_version

    @property
    def schema_version(self) -> int:
        return self._schema_version

    def state(self) -> ComponentState:
        tensors: dict[str, Any] = {}
        return ComponentState(tensors, {"data": tree.split(self._live.state_dict(), tensors)})

    def load(self, state: ComponentState, schema_version: int) -> None:
        del schema_version
        stored = tree.join(state.values["data"], state.tensors)
        self._live.load_state_dict(_on_devices_of(self._live.state_dict(), stored))

    def live_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The tensors at the places of the stored ones, where they have the same shape."""
        return _with_shapes(self.state().tensors, shapes)


class GeneratorPart:
    """A random generator of numpy, of python or of torch, with its state in place."""

    schema_version = 1

    def __init__(self, live: Any) -> None:
        self._live = live

    def state(self) -> ComponentState:
        tensors: dict[str, Any] = {}
        return ComponentState(tensors, {"data": tree.split(self._get(), tensors)})

    def load(self, state: ComponentState, schema_version: int) -> None:
        del schema_version
        stored = tree.join(state.values["data"], state.tensors)
        if isinstance(self._live, np.random.Generator):
            self._live.bit_generator.state = stored
        elif isinstance(self._live, np.random.RandomState):
            self._live.set_state(stored)
        elif isinstance(self._live, random.Random):
            self._live.setstate(stored)
        else:
            self._live.set_state(stored)

    def _get(self) -> Any:
        if isinstance(self._live, np.random.Generator):
            return self._live.bit_generator.state
        if isinstance(self._live, np.random.RandomState):
            return self._live.get_state(legacy=False)
        if isinstance(self._live, random.Random):
            return self._live.getstate()
        return self._live.get_state()


class GlobalGenerators:
    """The global generators of python and numpy, in scripts that do without torch."""

    schema_version = 1

    def state(self) -> ComponentState:
        tensors: dict[str, Any] = {}
        numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
        held = {"python": random.getstate(), "numpy": numpy_state}
        return ComponentState(tensors, {"data": tree.split(held, tensors)})

    def load(self, state: ComponentState, schema_version: int) -> None:
        del schema_version
        stored = tree.join(state.values["data"], state.tensors)
        random.setstate(stored["python"])
        np.random.set_state(stored["numpy"])  # noqa: NPY002


class Progress:
    """Completed steps and the number of steps there will be; saved with everything else."""

    schema_version = 1

    def __init__(self) -> None:
        self.step = 0
        self.total = 0
        """0 as long as nobody has said how many."""

    def agree(self, total: int | None, *, change: bool, run_dir: Path) -> None:
        """Take the number of steps that a script asks for; None: the one that was saved.

        Raises:
            ConfigError: Nobody has said how many, or another number was saved and not ``change``.
        """
        known = self.total
        if total is None and not known:
            raise refusals.no_total()
        if total is not None and known and total != known and not change:
            raise refusals.other_total(run_dir, total=total, known=known, step=self.step)
        self.total = known if total is None else total

    def state(self) -> ComponentState:
        return ComponentState(values={"step": self.step, "total": self.total})

    def load(self, state: ComponentState, schema_version: int) -> None:
        del schema_version
        self.step, self.total = int(state.values["step"]), int(state.values["total"])


def _with_shapes(live: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {n: live[n] for n, s in shapes.items() if n in live and tuple(live[n].shape) == s}


def is_generator(value: object) -> bool:
    """Whether it is a random generator of numpy, python or torch."""
    torch = tree.torch_module()
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds) or (torch is not None and isinstance(value, torch.Generator))


def _on_devices_of(live: Any, stored: Any) -> Any:
    """``stored`` with its tensors on the devices of the tensors that are in their places now."""
    if tree.is_tensor(stored):
        return stored.to(live.device) if tree.is_tensor(live) else stored
    if isinstance(stored, dict):
        held = cast("Mapping[Any, Any]", live if isinstance(live, Mapping) else {})
        items = cast("dict[Any, Any]", stored).items()
        return {key: _on_devices_of(held.get(key), item) for key, item in items}
    if isinstance(stored, list | tuple):
        items = cast("list[Any]", stored)
        have = cast("list[Any]", live) if isinstance(live, list | tuple) else []
        return type(items)(
            [_on_devices_of(have[i] if i < len(have) else None, x) for i, x in enumerate(items)]
        )
    return stored


def _text(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}"
