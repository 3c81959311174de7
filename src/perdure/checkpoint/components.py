"""Ready-made components that need no torch."""

from __future__ import annotations

from typing import Any

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
