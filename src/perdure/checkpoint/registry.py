"""The packing list: which named parts of a run a checkpoint stores, and of which kind they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from perdure.checkpoint.migrations import Migrations
from perdure.core.components import Checkpointable
from perdure.core.errors import ConfigError

Kind = Literal[
    "model", "optimizer", "scheduler", "experience", "tensors", "values", "counters", "rng"
]
"""What a component is; it decides the folder of its tensors and its turn when restoring."""

RESTORE_ORDER: tuple[Kind, ...] = get_args(Kind)
"""Kinds in the order they are restored: model first, random number generators last."""

LEGACY = "legacy"
"""Folder of pickles inside a checkpoint's directory."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}(/[A-Za-z0-9_-]{1,200})*")
"""Between two slashes it becomes the name of a file, of which most file systems take 255 bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered component."""

    name: str
    component: Checkpointable
    kind: Kind
    required: bool
    legacy: bool = False
    """Whether it may be stored as a pickle."""
    per_rank: bool = False
    """Whether every rank has a state of its own, in place of one that all ranks share."""

    @property
    def tensor_file(self) -> str:
        """Where its tensors go inside a checkpoint's directory."""
        return tensor_file_of(self.name, self.kind)

    @property
    def legacy_file(self) -> str:
        """Where its pickle goes inside a checkpoint's directory."""
        return f"{LEGACY}/{self.name}.pickle"


def tensor_file_of(name: str, kind: Kind) -> str:
    """Where the tensors of a component go inside a checkpoint's directory."""
    folder = kind if kind in ("model", "optimizer") else "tensors"
    return f"{folder}/{name}.safetensors"


class Registry:
    """Named components. Names nest with ``/`` (``agents/0/policy``).

    Args:
        required: Names that must be registered before anything may be saved or restored.
        migrations: Applied to stored states of older schema versions before they are loaded.
    """

    def __init__(
        self, required: Iterable[str] = (), *, migrations: Migrations | None = None
    ) -> None:
        self.migrations = migrations or Migrations()
        self._required = tuple(required)
        self._entries: dict[str, Entry] = {}

    def register(
        self,
        name: str,
        component: Checkpointable,
        *,
        kind: Kind,
        required: bool = True,
        legacy: bool = False,
        per_rank: bool = False,
    ) -> None:
        """Add a component.

        Args:
            name: Letters, digits, ``_`` and ``-``, nested with ``/``, up to 200 between.
            component: The part itself; it is asked for its state at every save.
            kind: Decides the folder of its tensors and its turn when restoring.
            required: Whether a checkpoint without it is refused when restoring.
            legacy: Whether it may be stored as a pickle; see ``LegacyComponent``.
            per_rank: Whether every rank has a state of its own.

        Raises:
            ConfigError: A name that is malformed or taken, or an unknown kind.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                "cannot be the name of a component",
                where=repr(name),
                rule="names consist of letters, digits, _ and -, nested with /, up to 200 between",
                way_out="choose another name",
            )
        if kind not in RESTORE_ORDER:
            raise ConfigError(
                f"{kind!r} is not a kind of component",
                where=name,
                rule="the kind says when it is restored",
                way_out="use one of " + ", ".join(RESTORE_ORDER),
            )
        if name in self._entries:
            raise ConfigError(
                "a component of this name is registered already",
                where=name,
                rule="a name belongs to one component",
                way_out="choose another name, e.g. a nested one",
            )
        self._entries[name] = Entry(name, component, kind, required, legacy, per_rank)

    def entries(self) -> tuple[Entry, ...]:
        """All components in the order they are restored.

        Raises:
            ConfigError: A required name was never registered; nothing may be saved.
        """
        missing = [name for name in self._required if name not in self._entries]
        if missing:
            raise ConfigError(
                "required components are not registered",
                where=", ".join(missing),
                rule="a checkpoint without them could not be resumed from",
                way_out="register them before the first save",
            )
        return tuple(
            sorted(self._entries.values(), key=lambda entry: RESTORE_ORDER.index(entry.kind))
        )
