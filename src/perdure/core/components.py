"""The component contract: what a checkpoint stores of each named part of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ComponentState:
    """State of one component.

    Attributes:
        tensors: Name → numpy array or torch tensor. The engine copies them while staging; they are
            never referred to afterwards.
        values: msgpack-able small values (numbers, text, bytes, lists, mappings with text keys).
    """

    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Checkpointable(Protocol):
    """A part of a run that a checkpoint stores under a name."""

    @property
    def schema_version(self) -> int:
        """Raised whenever the meaning of the state changes."""
        ...

    def state(self) -> ComponentState:
        """Current state; tensors may alias live ones (the engine copies before it returns)."""
        ...

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take the state over *in place*; must copy, never alias ``state``.

        Raises:
            ValueError: The state does not fit (missing or extra name, wrong shape or dtype).
        """
        ...


@runtime_checkable
class Versioned(Protocol):
    """A component that says when its state changes, so that no torn copy of it is ever saved."""

    @property
    def state_version(self) -> int:
        """Even while nothing changes, odd during a change, never the same again after one.

        It is read before and after the copy. :class:`perdure.checkpoint.ChangeCounter` counts so.
        """
        ...
