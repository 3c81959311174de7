"""The guard against torn copies: a state that changed while it was copied is not saved."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from perdure.checkpoint.arena import torch_arena
from perdure.checkpoint.registry import Entry
from perdure.core.components import is_versioned


class ChangeCounter:
    """Counts changes of a state that other threads than the saving one make.

        with counter.changing():
            optimizer.step()

    A component hands its :attr:`value` out as ``state_version``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changing = 0
        self._value = 0

    @property
    def value(self) -> int:
        """Even while nothing changes, odd during a change."""
        return self._value

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        """The body changes the state. Changes may overlap."""
        with self._lock:
            self._changing += 1
            if self._changing == 1:
                self._value += 1
            else:
                self._value += 2
        try:
            yield
        finally:
            with self._lock:
                self._changing -= 1
                if self._changing == 0:
                    self._value += 1


class TornCopyError(Exception):
    """States changed while they were copied. Its arguments are the names of their components."""


class CopyGuard:
    """Versions of all components before a copy, to be compared with those after it."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._versions = [
            (entry.name, entry.component, entry.component.state_version)
            for entry in entries
            if is_versioned(entry.component)
        ]
        self._tensors: list[tuple[str, list[Any], list[int]]] = []
        self._refuse([name for name, _, version in self._versions if version % 2])

    def watch(self, component: str, tensors: Mapping[str, Any]) -> None:
        """Also compare torch's own counters of these tensors."""
        watched = [tensor for tensor in tensors.values() if not isinstance(tensor, np.ndarray)]
        if watched:
            self._tensors.append((component, watched, torch_arena().versions_of(watched)))

    def compare(self) -> None:
        """Raises ``TornCopyError`` if a version is not what it was."""
        torn = [name for name, live, version in self._versions if live.state_version != version]
        torn += [
            name
            for name, tensors, versions in self._tensors
            if torch_arena().versions_of(tensors) != versions
        ]
        self._refuse(torn)

    def _refuse(self, torn: Sequence[str]) -> None:
        if torn:
            raise TornCopyError(*dict.fromkeys(torn))
