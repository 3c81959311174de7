"""Components as a checkpoint holds them, to be stored again without the objects they came from."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.checkpoint.manifest import Manifest
from perdure.checkpoint.migrations import Migrations
from perdure.checkpoint.reading import CheckpointReader
from perdure.checkpoint.registry import Registry
from perdure.core.components import ComponentState, Segment


class StoredComponent:
    """A state that was read from a checkpoint, perhaps migrated."""

    def __init__(self, state: ComponentState, schema_version: int) -> None:
        self._state = state
        self._schema_version = schema_version

    @property
    def schema_version(self) -> int:
        return self._schema_version

    def state(self) -> ComponentState:
        return self._state

    def load(self, state: ComponentState, schema_version: int) -> None:
        """Take another state over, as a whole."""
        self._state, self._schema_version = state, schema_version


class StoredRows(StoredComponent):
    """The same with segments, which are named again and not written again."""

    def __init__(
        self, state: ComponentState, schema_version: int, segments: Sequence[Segment]
    ) -> None:
        super().__init__(state, schema_version)
        self._segments = tuple(segments)

    def segments(self) -> Sequence[Segment]:
        return self._segments

    def sealed(self) -> Sequence[Segment]:
        return self._segments

    def load_segments(self, segments: Sequence[Segment] | None) -> None:
        self._segments = tuple(segments or ())


def outdated(manifest: Manifest, migrations: Migrations) -> dict[str, tuple[int, int]]:
    """Components that the migrations lead further → schema version as stored, and afterwards."""
    reach = {
        name: (entry.schema_version, migrations.newest(name, entry.schema_version))
        for name, entry in manifest.components.items()
    }
    return {name: versions for name, versions in reach.items() if versions[0] != versions[1]}


def stored_registry(reader: CheckpointReader, migrations: Migrations) -> Registry:
    """Every component of a checkpoint, migrated as far as the steps lead.

    Raises:
        DamagedError: A file is missing or wrong.
        ConfigError: A migration has failed.
    """
    registry, values = Registry(), reader.values()
    for name, entry in reader.manifest.components.items():
        state = ComponentState(reader.tensors(name), values.get(name, {}), reader.legacy(name))
        stored = entry.schema_version
        wanted = migrations.newest(name, stored)
        state, version = migrations.apply(name, state, stored=stored, wanted=wanted)
        if name in reader.manifest.segments:
            component = StoredRows(state, version, reader.segments(name))
        else:
            component = StoredComponent(state, version)
        registry.register(name, component, kind=entry.kind, legacy=bool(entry.legacy_file))
    return registry
