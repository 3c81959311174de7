"""Migrations: functions that turn a stored state of one schema version into the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError

Migration = Callable[[ComponentState], ComponentState]
"""Gets a stored state of version n, returns it as version n + 1; it may change what it is given."""


class Migrations:
    """Steps from one schema version to the next, by component.

        migrations = Migrations()

        @migrations.step("agents/*/normaliser", 1)
        def variance_in_place_of_deviation(state: ComponentState) -> ComponentState: ...

    Names may be patterns with ``*``; the exact name goes before a pattern.
    """

    def __init__(self) -> None:
        self._steps: dict[str, dict[int, Migration]] = {}

    def step(self, component: str, from_version: int) -> Callable[[Migration], Migration]:
        """Decorate the function that turns ``from_version`` into ``from_version + 1``.

        Raises:
            ConfigError: There is one already.
        """

        def add(migration: Migration) -> Migration:
            steps = self._steps.setdefault(component, {})
            if from_version in steps:
                raise ConfigError(
                    f"there are two migrations from schema version {from_version}",
                    where=f"component {component}",
                    rule="one way leads from each version to the next",
                    way_out="keep one of them",
                )
            steps[from_version] = migration
            return migration

        return add

    def newest(self, component: str, version: int) -> int:
        """How far the steps lead from ``version`` without a gap."""
        steps = self.steps_of(component)
        while version in steps:
            version += 1
        return version

    def apply(
        self, component: str, state: ComponentState, *, stored: int, wanted: int
    ) -> tuple[ComponentState, int]:
        """Bring a stored state to the schema version that is wanted.

        A component without any step is handed its state as it is, to convert it by itself.

        Args:
            component: Its name.
            state: As stored.
            stored: Its schema version.
            wanted: That of the component now; not below ``stored``.

        Returns:
            The state and its schema version.

        Raises:
            ConfigError: A step is missing, or one has failed.
        """
        steps = self.steps_of(component)
        if not steps:
            return state, stored
        for version in range(stored, wanted):
            if version not in steps:
                raise ConfigError(
                    f"there is no migration from schema version {version} to {version + 1}",
                    where=f"component {component}",
                    rule=f"it was stored with version {stored}, and {wanted} is wanted",
                    way_out=f"add the step: @migrations.step({component!r}, {version})",
                )
            state = _migrated(component, steps[version], state, version)
        return state, wanted

    def steps_of(self, component: str) -> Mapping[int, Migration]:
        """Version → the step from it, of one component."""
        if component in self._steps:
            return MappingProxyType(self._steps[component])
        found = [steps for name, steps in self._steps.items() if fnmatchcase(component, name)]
        return MappingProxyType(found[0] if found else {})


def _migrated(
    component: str, migration: Migration, state: ComponentState, version: int
) -> ComponentState:
    # A copy of the outer maps, so that a step may take parts out and put others in.
    given = ComponentState(dict(state.tensors), dict(state.values), state.legacy)
    try:
        migrated = migration(given)
        if not isinstance(migrated, ComponentState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"it returned a {type(migrated).__name__}, not a ComponentState")
    except Exception as error:
        raise ConfigError(
            f"the migration from schema version {version} to {version + 1} failed"
            f" ({type(error).__name__}: {error})",
            where=f"component {component}",
            rule="a migration turns every state of its version into one of the next",
            way_out="mend it; the checkpoint is as it was",
        ) from error
    return migrated
