"""Restoring: from a verified checkpoint back into the registered components, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.checkpoint.manifest import ComponentEntry, Manifest
from perdure.checkpoint.migrations import Migrations
from perdure.checkpoint.reading import CheckpointReader
from perdure.checkpoint.registry import Entry
from perdure.checkpoint.segments.store import SegmentStore
from perdure.checkpoint.shares import ALONE, RankPlace, placed, split_name
from perdure.checkpoint.verification import Choice
from perdure.core import sealed_json
from perdure.core.components import ComponentState, Segment, Segmented, Spread
from perdure.core.errors import ConfigError, FutureFormatError
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
        place: Which rank of several loads; of tensors spread over ranks it loads its part.
        regrouped: Components with a state per rank that may be without one here, or leave one
            behind, because the number of ranks has changed. Generators always may.
    """

    cold: Collection[str] = ()
    store: SegmentStore | None = None
    migrations: Migrations = field(default_factory=Migrations)
    allow_legacy: bool = False
    place: RankPlace = ALONE
    regrouped: Collection[str] = ()


AS_STORED = Loading()


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
    selected = _select(choice.manifest, entries, only, how)
    _check_segmented(choice.manifest, selected, how.cold)
    _check_legacy(choice.manifest, selected, allowed=how.allow_legacy)
    _mark(storage, RESTORING, choice)
    faults.reach(FaultPoint.RESTORE_STARTED)
    reader = CheckpointReader(storage, choice.manifest)
    values = reader.values()

    def load(entry: Entry) -> None:
        tensors = _tensors(reader, entry)
        state = ComponentState(tensors, values.get(entry.name, {}), reader.legacy(entry.name))
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


def _tensors(reader: CheckpointReader, entry: Entry) -> dict[str, Any]:
    """The stored tensors of a component; of those that it has a part of, that part."""
    stored = reader.stored_tensors(entry.name)
    if not isinstance(entry.component, Spread):
        return {name: tensor.load() for name, tensor in stored.items()}
    live = entry.component.live_tensors({name: one.spec.shape for name, one in stored.items()})
    return {name: placed(live.get(name), tensor.load) for name, tensor in stored.items()}


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
    manifest: Manifest, entries: Sequence[Entry], only: Collection[str] | None, how: Loading
) -> list[Entry]:
    """Components to load. Nothing is left out that was not left out on purpose."""
    registered = {entry.name: entry for entry in entries}
    stored = manifest.components
    directory = manifest.name.directory
    for name in only or ():
        if name not in registered or name not in stored:
            known = sorted(registered.keys() & stored.keys())
            raise ConfigError(
                f"{name!r} is not a component of {directory} that is registered",
                where="selection",
                rule="one of " + ", ".join(known),
                way_out=hint(name, known),
            )
    wanted = [entry for entry in entries if only is None or entry.name in only]
    here = how.place.named(wanted)
    if only is None:
        _refuse_unknown(manifest, registered, how)
        required = [e.name for e in here if e.name not in stored and e.required and not e.per_rank]
        if required:
            raise ConfigError(
                f"lacks required components: {', '.join(required)}",
                where=directory,
                rule="a required component is always restored",
                way_out="register them with required=False, or name what to load",
            )
    for entry in here:
        if entry.name not in stored and entry.per_rank:
            _require_regrouped(split_name(entry.name)[0], registered, manifest, how)
    return [entry for entry in here if entry.name in stored]


def _refuse_unknown(manifest: Manifest, registered: Mapping[str, Entry], how: Loading) -> None:
    unknown: list[str] = []
    for name in sorted(manifest.components.keys() - registered.keys()):
        base, rank = split_name(name)
        if base not in registered or not registered[base].per_rank:
            unknown.append(name)
        elif rank >= how.place.size:
            _require_regrouped(base, registered, manifest, how)
    if unknown:
        raise ConfigError(
            f"holds components that are not registered: {', '.join(unknown)}",
            where=manifest.name.directory,
            rule="a stored component is never dropped silently",
            way_out="register them, or name what to load",
        )


def _require_regrouped(
    name: str, registered: Mapping[str, Entry], manifest: Manifest, how: Loading
) -> None:
    """Nobody's own state is dropped, and nobody goes without, that was not named for it."""
    if registered[name].kind == "rng" or name in how.regrouped:
        return
    if how.place.size == manifest.ranks:
        raise ConfigError(
            f"lacks the state of rank {how.place.rank}",
            where=f"component {name} in {manifest.name.directory}",
            rule="a required component is always restored",
            way_out=f"accept that it starts anew: accept_changes=[{name!r}]",
        )
    raise ConfigError(
        f"was stored by {manifest.ranks} ranks, each its own, and {how.place.size} load",
        where=f"component {name}",
        rule="a rank's own state is loaded by that rank, and never dropped silently",
        way_out=f"start {manifest.ranks} ranks, or accept it: accept_changes=[{name!r}]",
    )


def _load(
    entry: Entry, state: ComponentState, stored: ComponentEntry, migrations: Migrations
) -> None:
    wanted = entry.component.schema_version
    if stored.schema_version > wanted:
        raise FutureFormatError(
            f"schema version {stored.schema_version} is newer than {wanted}",
            where=f"component {entry.name}",
            rule="states are migrated to newer versions, never back",
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
