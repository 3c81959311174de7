"""Restoring: from a verified checkpoint back into the registered components, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import xxhash

from perdure.checkpoint.arena import materialize
from perdure.checkpoint.layout import TensorSpec, parse_header
from perdure.checkpoint.manifest import (
    EXPERIENCE_FILE,
    STATE_FILE,
    ComponentEntry,
    Manifest,
    directory_path,
)
from perdure.checkpoint.migrations import Migrations
from perdure.checkpoint.registry import Entry
from perdure.checkpoint.segments.mapped import MappedSegment, Mappings, open_segment
from perdure.checkpoint.segments.store import SegmentStore
from perdure.checkpoint.verification import Choice
from perdure.core import sealed_json
from perdure.core.components import ComponentState, Segment, Segmented
from perdure.core.errors import ConfigError, DamagedError, FutureFormatError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.names import hint
from perdure.core.storage_api import Storage

RESTORING = "restoring.json"
RESTORED = "restored.json"
"""Markers in the run directory, for people and tools: restoring may be repeated at any time."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How states come back.

    Attributes:
        cold: Segmented components that start without their rows (an empty replay, say).
        store: Opens segments; without one, a segment that is found damaged stays in its place.
        migrations: Applied to states of older schema versions.
        allow_legacy: Whether pickles may be opened, which runs the code they name.
    """

    cold: Collection[str] = ()
    store: SegmentStore | None = None
    migrations: Migrations = field(default_factory=Migrations)
    allow_legacy: bool = False


AS_STORED = Loading()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file; ``data`` are its bytes there, not to be written to."""

    spec: TensorSpec
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def load(self) -> Any:
        """The tensor in memory of its own."""
        return materialize(self.data, self.spec)


class CheckpointReader:
    """Contents of one checkpoint. Every file is checked against the manifest as it is read."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.manifest = manifest
        self._storage = storage
        self._root = directory_path(manifest.name.directory)

    def values(self) -> dict[str, dict[str, Any]]:
        """Small values of every component, by name."""
        packed = self._unpack(STATE_FILE)["components"]
        return {name: _unpack(data, self._path(STATE_FILE)) for name, data in packed.items()}

    def experience(self) -> dict[str, Any]:
        """What was staged as ``StagedInfo.experience``."""
        return dict(self._unpack(EXPERIENCE_FILE)["experience"])

    def tensors(self, component: str) -> dict[str, Any]:
        """Tensors of a component in memory of their own: numpy arrays, torch where numpy cannot."""
        return {name: stored.load() for name, stored in self.stored_tensors(component).items()}

    def legacy(self, component: str) -> bytes | None:
        """The pickle of a component, checked and not opened; None if it has none."""
        file = self.manifest.components[component].legacy_file
        return self._read(file).tobytes() if file else None

    def tensor_file(self, component: str) -> memoryview:
        """All bytes of its tensor file, checked: what any safetensors reader opens. Maybe none."""
        file = self.manifest.components[component].tensor_file
        return self._read(file).data if file else memoryview(b"")

    def stored_tensors(self, component: str) -> dict[str, StoredTensor]:
        """Tensors of a component, to be read one by one."""
        file = self.manifest.components[component].tensor_file
        if not file:
            return {}
        data = self._read(file)
        try:
            start, places = parse_header(_header(data), file_size=data.nbytes)
        except ValueError as error:
            raise self._damaged(file, f"not a tensor file ({error})") from error
        return {
            place.name: StoredTensor(place.spec, data[start + place.start : start + place.end])
            for place in places
        }

    def segments(self, component: str, store: SegmentStore | None = None) -> list[MappedSegment]:
        """Segments of a component, opened; their rows are checked before they are first used.

        Args:
            component: Its name.
            store: Opens them; without one, a segment that is found damaged stays in its place.
        """
        stored = self.manifest.segments.get(component, ())
        if store is not None:
            return store.open(component, stored)
        mappings = Mappings(self._storage)
        return [open_segment(one, component=component, mappings=mappings) for one in stored]

    def _unpack(self, file: str) -> dict[str, Any]:
        return _unpack(self._read(file).tobytes(), self._path(file))

    def _read(self, file: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        entry = self.manifest.files.get(file)
        if entry is None:
            raise self._damaged(file, "not listed in the manifest")
        try:
            data = self._storage.map(self._path(file))
        except FileNotFoundError as error:
            raise self._damaged(file, "missing") from error
        if data.nbytes != entry.bytes or xxhash.xxh3_128_hexdigest(data.data) != entry.checksum:
            raise self._damaged(file, "checksum does not match")
        return data

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    def _damaged(self, file: str, reason: str) -> DamagedError:
        return DamagedError(
            reason, where=self._path(file), way_out="resume again: an earlier checkpoint is used"
        )


def restore(
    storage: Storage,
    choice: Choice,
    entries: Sequence[Entry],
    *,
    faults: FaultHook,
    only: Collection[str] | None = None,
    how: Loading = AS_STORED,
) -> None:
    """Load components in place, in the order of ``entries`` (that of the registry).

    May be repeated any number of times. A failure leaves the components half restored; the process
    must not go on with them.

    Args:
        storage: The run's storage.
        choice: The checkpoint, as chosen.
        entries: Registered components.
        faults: Reached when started, when the models are loaded and when done.
        only: Names to load (weights only, say); None = all, and every stored one must be known.
        how: Where segments are opened, which components start without theirs, and migrations.

    Raises:
        ConfigError: Stored and registered components differ, a state does not fit, a migration is
            missing, or a pickle is not allowed.
        DamagedError: A file changed since the checkpoint was chosen.
        FutureFormatError: A component was stored with a newer schema version.
    """
    selected = _select(choice.manifest, entries, only)
    _check_segmented(choice.manifest, selected, how.cold)
    _check_legacy(choice.manifest, selected, allowed=how.allow_legacy)
    _mark(storage, RESTORING, choice)
    faults.reach(FaultPoint.RESTORE_STARTED)
    reader = CheckpointReader(storage, choice.manifest)
    values = reader.values()

    def load(entry: Entry) -> None:
        state = ComponentState(
            reader.tensors(entry.name), values.get(entry.name, {}), reader.legacy(entry.name)
        )
        _load(entry, state, choice.manifest.components[entry.name], how.migrations)
        if isinstance(entry.component, Segmented):
            cold = entry.name in how.cold
            _load_segments(entry, None if cold else reader.segments(entry.name, how.store))

    for entry in selected:
        if entry.kind == "model":
            load(entry)
    faults.reach(FaultPoint.RESTORE_MODEL)
    for entry in selected:
        if entry.kind != "model":
            load(entry)
    _mark(storage, RESTORED, choice)
    storage.remove(RESTORING)
    faults.reach(FaultPoint.RESTORE_DONE)


def _check_legacy(manifest: Manifest, selected: Sequence[Entry], *, allowed: bool) -> None:
    """No pickle is opened that both sides have not asked for."""
    for entry in selected:
        if not manifest.components[entry.name].legacy_file:
            continue
        if not entry.legacy:
            raise ConfigError(
                "was stored as a pickle, which what is registered now cannot load",
                where=f"component {entry.name}",
                rule="nothing is unpickled that was not registered with legacy=True",
                way_out="register it so, or name what to load",
            )
        if not allowed:
            raise ConfigError(
                "is stored as a pickle",
                where=f"component {entry.name}",
                rule="opening a pickle runs the code it names, so it has to be allowed",
                way_out="set allow_legacy=True if you trust whoever could write the run",
            )


def _check_segmented(manifest: Manifest, selected: Sequence[Entry], cold: Collection[str]) -> None:
    """Nothing starts cold that was not named for it; no segments are left behind unnoticed."""
    segmented = {entry.name for entry in selected if isinstance(entry.component, Segmented)}
    for name in cold:
        if name not in segmented:
            raise ConfigError(
                f"{name!r} is not a component that could start without its rows",
                where="cold",
                rule="one of " + (", ".join(sorted(segmented)) or "none"),
                way_out=hint(name, segmented),
            )
    for entry in selected:
        if entry.name in manifest.segments and entry.name not in segmented:
            raise ConfigError(
                "was saved with segments, which what is registered now cannot load",
                where=f"component {entry.name}",
                rule="stored rows are never dropped silently",
                way_out="register the component it was saved with, or name what to load",
            )


def _select(
    manifest: Manifest, entries: Sequence[Entry], only: Collection[str] | None
) -> list[Entry]:
    """Components to load. Nothing is left out that was not left out on purpose."""
    registered = {entry.name: entry for entry in entries}
    directory = manifest.name.directory
    for name in only or ():
        if name not in registered or name not in manifest.components:
            known = sorted(registered.keys() & manifest.components.keys())
            raise ConfigError(
                f"{name!r} is not a component of {directory} that is registered",
                where="selection",
                rule="one of " + ", ".join(known),
                way_out=hint(name, known),
            )
    if only is not None:
        return [entry for entry in entries if entry.name in only]
    unknown = sorted(manifest.components.keys() - registered.keys())
    if unknown:
        raise ConfigError(
            f"holds components that are not registered: {', '.join(unknown)}",
            where=directory,
            rule="a stored component is never dropped silently",
            way_out="register them, or name what to load",
        )
    absent = [name for name in registered if name not in manifest.components]
    required = [name for name in absent if registered[name].required]
    if required:
        raise ConfigError(
            f"lacks required components: {', '.join(required)}",
            where=directory,
            rule="a required component is always restored",
            way_out="register them with required=False, or name what to load",
        )
    return [entry for entry in entries if entry.name not in absent]


def _load(
    entry: Entry, state: ComponentState, stored: ComponentEntry, migrations: Migrations
) -> None:
    wanted = entry.component.schema_version
    if stored.schema_version > wanted:
        raise FutureFormatError(
            f"schema version {stored.schema_version} is newer than {wanted}",
            where=f"component {entry.name}",
            way_out="use the version that wrote it, or a newer one",
        )
    state, version = migrations.apply(
        entry.name, state, stored=stored.schema_version, wanted=wanted
    )
    try:
        entry.component.load(state, version)
    except ValueError as error:
        raise _does_not_fit(entry, error) from error


def _load_segments(entry: Entry, segments: Sequence[Segment] | None) -> None:
    assert isinstance(entry.component, Segmented)
    try:
        entry.component.load_segments(segments)
    except ValueError as error:
        raise _does_not_fit(entry, error) from error


def _does_not_fit(entry: Entry, error: ValueError) -> ConfigError:
    return ConfigError(
        f"the stored state does not fit ({error})",
        where=f"component {entry.name}",
        rule="names, shapes and types are those of the run that saved it",
        way_out="resume with the configuration of that run",
    )


def _mark(storage: Storage, path: str, choice: Choice) -> None:
    marker: Mapping[str, Any] = {"format": 1, "directory": choice.directory}
    storage.write_atomic(path, sealed_json.encode(dict(marker)))


def _header(data: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    length = int.from_bytes(data[:8].tobytes(), "little")
    return data[: 8 + length].tobytes()


def _unpack(data: bytes, where: str) -> dict[str, Any]:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedError(f"not msgpack ({error})", where=where) from error
