"""The counters of a run as a checkpoint component."""

from __future__ import annotations

from perdure.core.components import ComponentState


class Progress:
    """Where the run stands. All counts are of completed units."""

    schema_version = 1
    _FIELDS = ("warm_start_step", "training", "global_step", "local_updates")

    def __init__(self) -> None:
        self.warm_start_step = 0
        """Optimizer steps of the supervised warm start."""
        self.training = 0
        """1 once the warm start is over and training proper has begun."""
        self.global_step = 0
        self.local_updates = 0
        """Local updates of the global step in progress."""

    def complete(self, step: int) -> None:
        """The step in progress is done."""
        assert step == self.global_step + 1
        self.global_step = step
        self.local_updates = 0

    def state(self) -> ComponentState:
        return ComponentState(values={name: getattr(self, name) for name in self._FIELDS})

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take counters over. Raises ``ValueError`` for other fields or another schema."""
        if schema_version != self.schema_version or set(state.values) != set(self._FIELDS):
            raise ValueError(
                f"progress has schema {schema_version} and fields {sorted(state.values)},"
                f" not {self.schema_version} and {sorted(self._FIELDS)}"
            )
        for name in self._FIELDS:
            setattr(self, name, int(state.values[name]))
