"""Ready-made components that need no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.checkpoint.dtypes import code_of
from perdure.core.components import ComponentState


class ValuesComponent:
    """A dictionary of small values (counters, coefficients), restored in place.

    Args:
        values: The live dictionary; keys are fixed once a checkpoint was taken.
        schema_version: Raised whenever the meaning of a key changes.
    """

    def __init__(self, values: dict[str, Any], *, schema_version: int = 1) -> None:
        self.values = values
        self._schema_version = schema_version

    @property
    def schema_version(self) -> int:
        return self._schema_version

    def state(self) -> ComponentState:
        return ComponentState(values=dict(self.values))

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take values over.

        Raises:
            ValueError: Other keys or another schema version than the live ones.
        """
        if schema_version != self._schema_version:
            raise ValueError(f"schema version {schema_version}, expected {self._schema_version}")
        different = sorted(self.values.keys() ^ state.values.keys())
        if different:
            raise ValueError(f"keys differ: {', '.join(different)}")
        self.values.update(state.values)


class ArraysComponent:
    """Named numpy arrays (running statistics, normalisers), restored into the live ones.

    Args:
        arrays: The live arrays; names, shapes and types are fixed once a checkpoint was taken.
        schema_version: Raised whenever the meaning of an array changes.
    """

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]], *, schema_version: int = 1) -> None:
        self.arrays = arrays
        self._schema_version = schema_version

    @property
    def schema_version(self) -> int:
        return self._schema_version

    def state(self) -> ComponentState:
        return ComponentState(tensors=dict(self.arrays))

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Copy every array into the live one of its name.

        Raises:
            ValueError: Names, shapes, types or the schema version differ; nothing was changed.
        """
        if schema_version != self._schema_version:
            raise ValueError(f"schema version {schema_version}, expected {self._schema_version}")
        different = sorted(self.arrays.keys() ^ state.tensors.keys())
        if different:
            raise ValueError(f"names differ: {', '.join(different)}")
        for name, live in self.arrays.items():
            stored = state.tensors[name]
            if stored.shape != live.shape or code_of(stored.dtype) != code_of(live.dtype):
                raise ValueError(
                    f"{name} is {stored.shape} {stored.dtype}, expected {live.shape} {live.dtype}"
                )
        for name, live in self.arrays.items():
            np.copyto(live, state.tensors[name])
