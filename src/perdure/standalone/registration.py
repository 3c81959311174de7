"""Registering the parts of a script under names, each by its type."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypedDict, Unpack, cast

import numpy as np

from perdure.checkpoint import Kind, LegacyComponent, Migrations, Registry
from perdure.core.components import Checkpointable, Segmented
from perdure.core.errors import ConfigError
from perdure.core.names import hint
from perdure.standalone import tree
from perdure.standalone.parts import (
    DataPart,
    GeneratorPart,
    GlobalGenerators,
    Progress,
    Stateful,
    StatefulPart,
    is_generator,
    part_of,
)

PROGRESS = "progress"
"""Name of the engine's own component."""
ALL_GENERATORS = "all"
_WAY_OUT = (
    "register a dict of its plain parts, or give it state_dict() and load_state_dict(), or"
    " schema_version, state() and load()"
)


class PartOptions(TypedDict, total=False):
    """What ``add`` can say of a part beyond its name.

    Attributes:
        kind: Its turn when restoring; by its type if it is left out.
        schema_version: Raised when the meaning of the part's state changes; 1 at first.
        exact: Whether its state must equal the stored one right after loading; it must by default.
        legacy: Pickle it, whatever it is. Loading needs ``allow_legacy=True``; what comes back is
            not compared.
        per_rank: Whether every rank has a state of its own; generators have by default.
    """

    kind: Kind
    schema_version: int
    exact: bool
    legacy: bool
    per_rank: bool


@dataclass(frozen=True, slots=True)
class Mirror:
    """A value that a script keeps in two places; ``source`` is right."""

    source: str
    copy: str


class Parts:
    """Everything that was registered, as the script holds it and as components.

    Args:
        required: Names without which nothing is saved.
        accept_changes: Names of parts whose settings this script may have changed.
        migrations: Turn states of older schema versions into newer ones.
    """

    def __init__(
        self,
        required: Iterable[str],
        accept_changes: Iterable[str],
        migrations: Migrations | None = None,
    ) -> None:
        self.progress = Progress()
        self.named: dict[str, object] = {}
        """Name → what the script holds."""
        self.mirrors: list[Mirror] = []
        self.registry = Registry([*required], migrations=migrations)
        self._accepted = frozenset(accept_changes)
        self._torch_names: Any = None
        progress = part_of(PROGRESS, self.progress)
        self.registry.register(PROGRESS, progress, kind="counters")

    def add_all(self, parts: Mapping[str, object]) -> None:
        """Register by type. Containers that hold more than plain data become nested names.

        Raises:
            ConfigError: A name is malformed or taken, or a checkpoint cannot hold such an object.
        """
        for name, held in parts.items():
            if isinstance(held, str) and held == ALL_GENERATORS and name == "rng":
                part = part_of(name, _global_generators())
                self.registry.register(name, part, kind="rng", per_rank=True)
                continue
            inner = _nested(held)
            if inner is None:
                self.add(name, held)
            else:
                self.add_all({f"{name}/{key}": value for key, value in inner.items()})

    def add(self, name: str, held: object, **how: Unpack[PartOptions]) -> None:
        """Register one part; see ``CheckpointEngine.add``."""
        for option in how:
            if option not in PartOptions.__annotations__:
                raise ConfigError(
                    "is not an option of add()",
                    where=f"component {name}: {option}",
                    rule=f"one of {', '.join(PartOptions.__annotations__)}",
                    way_out=hint(option, PartOptions.__annotations__),
                )
        legacy = how.get("legacy", False)
        if any(other is held for other in self.named.values()):
            raise ConfigError(
                "this object is registered already",
                where=f"component {name}",
                rule="a part is saved once, under one name",
                way_out="leave one of the two out",
            )
        component, found, converts = (
            (LegacyComponent(held, name), "values", False)
            if legacy
            else self._component(name, held, how.get("schema_version", 1))
        )
        exact = how.get("exact", True) and name not in self._accepted
        part = part_of(name, component, exact=exact, converts=converts)
        kind = how.get("kind") or found
        per_rank = how.get("per_rank", kind == "rng")
        self.registry.register(name, part, kind=kind, legacy=legacy, per_rank=per_rank)
        self.named[name] = held

    def require_known(self, names: Collection[str]) -> None:
        """Raise ``ConfigError`` if one of the names was never registered."""
        for name in names:
            if name not in self.named:
                raise ConfigError(
                    "no part of this name is registered",
                    where=f"accept_changes: {name}",
                    rule="it lists parts whose changes are meant",
                    way_out=hint(name, self.named),
                )

    @property
    def accepted(self) -> frozenset[str]:
        return self._accepted

    def value_at(self, path: str) -> object:
        """The value at ``name.key``: of a dictionary, an optimizer's first group, an attribute.

        Raises:
            ConfigError: There is no such part or value.
        """
        holder, key = self._place(path)
        return holder[key] if isinstance(holder, dict) else getattr(holder, key)

    def set_at(self, path: str, value: object) -> None:
        """Replace the value at ``name.key``."""
        holder, key = self._place(path)
        if isinstance(holder, dict):
            holder[key] = value
        else:
            setattr(holder, key, value)

    def _place(self, path: str) -> tuple[Any, str]:
        name, _, key = path.partition(".")
        held: Any = self.named.get(name)
        groups = getattr(held, "param_groups", None)
        holder: Any = groups[0] if isinstance(groups, list) and groups else held
        there = key in holder if isinstance(holder, dict) else hasattr(holder, key)
        if not key or not there:
            raise ConfigError(
                "there is no such value",
                where=f"mirror {path!r}",
                rule="name.key: a key of a dict, a setting of an optimizer, or an attribute",
                way_out=hint(name, self.named) if held is None else "correct the key",
            )
        return holder, key

    def _component(
        self, name: str, held: object, schema_version: int
    ) -> tuple[Checkpointable, Kind, bool]:
        if _is_checkpointable(held):
            kind = "experience" if isinstance(held, Segmented) else "values"
            return cast("Checkpointable", held), kind, True
        if is_generator(held):
            return GeneratorPart(held), "rng", False
        if tree.torch_module() is not None:
            found = self._torch_component(name, held)
            if found is not None:
                return (*found, False)
        if tree.is_data(held) and not _is_immutable(held):
            return DataPart(held, schema_version=schema_version), _kind_of_data(held), False
        if callable(getattr(held, "state_dict", None)) and callable(
            getattr(held, "load_state_dict", None)
        ):
            stateful = cast("Stateful", held)
            return StatefulPart(stateful, schema_version=schema_version), "tensors", False
        raise ConfigError(
            f"is a {type(held).__module__}.{type(held).__qualname__}{_why(held)}",
            where=f"component {name}",
            rule=f"a checkpoint stores modules, optimizers, schedules, generators and {tree.DATA};"
            " nothing is pickled, since a pickle that works may still forget",
            way_out=_WAY_OUT,
        )

    def _torch_component(self, name: str, held: object) -> tuple[Checkpointable, Kind] | None:
        parts = torch_parts()
        if self._torch_names is None:
            self._torch_names = parts.ParameterNames(self.named)
        return parts.component_of(
            held, names=self._torch_names, keep_settings=name in self._accepted
        )


def torch_parts() -> ModuleType:
    """The half of this package that knows torch, imported only when the script has."""
    return importlib.import_module("perdure.standalone.torch_parts")


def _nested(held: object) -> dict[str, object] | None:
    """Parts inside a plain container that holds more than data; None if there are none."""
    if type(held) is dict:
        items = {str(key): item for key, item in cast("dict[object, object]", held).items()}
    elif type(held) in (list, tuple):
        items = {str(index): item for index, item in enumerate(cast("list[object]", held))}
    else:
        return None
    return None if tree.is_data(held) else items


def _global_generators() -> Checkpointable:
    torch = tree.torch_module()
    return GlobalGenerators() if torch is None else torch_parts().global_generators()


def _is_checkpointable(held: object) -> bool:
    has = all(callable(getattr(held, method, None)) for method in ("state", "load"))
    return has and hasattr(held, "schema_version")


def _is_immutable(held: object) -> bool:
    """Whether no other value can be put into the object itself."""
    if isinstance(held, np.generic) or tree.is_read_only(held):
        return True
    return not (isinstance(held, dict | list) or hasattr(held, "shape") or hasattr(held, "maxlen"))


def _kind_of_data(held: object) -> Kind:
    return "tensors" if hasattr(held, "shape") else "values"


def _why(held: object) -> str:
    if tree.is_read_only(held):
        return " that is read-only or expanded: copy it, or put it into a dict"
    if tree.is_data(held):
        return f" ({held!r}), which cannot change in place: put it into a dict"
    return ""
