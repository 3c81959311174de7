"""Staging: a consistent copy of all components in host memory, ready to be written."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgpack

from perdure.checkpoint.arena import Arena, spec_of
from perdure.checkpoint.guard import CopyGuard
from perdure.checkpoint.layout import ArenaLayout, TensorSpec, plan
from perdure.checkpoint.manifest import (
    EXPERIENCE_FILE,
    FORMAT,
    GROUPED_FEATURE,
    LEGACY_FEATURE,
    RANKS_FEATURE,
    SEGMENTS_FEATURE,
    Manifest,
    StagedInfo,
)
from perdure.checkpoint.registry import Entry
from perdure.checkpoint.shares import ALONE, RankPlace, Share, share_of, state_file
from perdure.core.clock import Clock
from perdure.core.components import Segment, StoredSegment, is_segmented
from perdure.core.errors import ConfigError
from perdure.core.ids import CheckpointName


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A staged checkpoint. Its tensors lie in ``arena``; nothing refers to live objects."""

    manifest: Manifest
    """Complete but for the files' checksums."""
    arena: Arena
    layout: ArenaLayout
    small_files: Mapping[str, bytes]
    segments: Mapping[str, tuple[Segment, ...]]
    """Component → its segments, which never change; not copied."""
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """File → xxh3-128 of its chunks, where they were taken as it was copied."""
    agreement: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of several ranks: component → digest of what must be the same on all of them."""

    @property
    def bytes(self) -> int:
        """Bytes of all files, manifest and segments left out."""
        small = sum(len(data) for data in self.small_files.values())
        return small + sum(image.size for image in self.layout.images)

    def naming(self, stored: Mapping[str, tuple[StoredSegment, ...]]) -> Snapshot:
        """The same with its segments, now on disk, in the manifest."""
        if not stored:
            return self
        features = (*self.manifest.features, SEGMENTS_FEATURE)
        manifest = replace(self.manifest, segments=stored, features=features)
        return replace(self, manifest=manifest)


class Stager:
    """Copies components into arenas; lays files out anew only when a shape changed.

    Args:
        clock: Dates the manifests.
        arenas: How many of them the engine holds, for the manifest.
        place: Which rank of several this is; of shared state it copies what it stores.
    """

    def __init__(self, clock: Clock, *, arenas: int, place: RankPlace = ALONE) -> None:
        self._clock = clock
        self._arenas = arenas
        self._place = place
        self._versions = library_versions()
        self._seen: dict[str, dict[str, tuple[Any, Any]]] | None = None
        self._layout = ArenaLayout((), 0)

    def stage(
        self, name: CheckpointName, *, info: StagedInfo, entries: tuple[Entry, ...], arena: Arena
    ) -> Snapshot:
        """Take all states and copy them.

        Raises:
            ConfigError: A component holds something a checkpoint cannot store.
            TornCopyError: A component changed meanwhile; the copy is worth nothing.
        """
        entries = self._place.named(entries)
        guard = CopyGuard(entries)
        states = {entry.name: entry.component.state() for entry in entries}
        share = share_of(entries, states, self._place)
        segments = {
            entry.name: tuple(entry.component.segments())
            for entry in entries
            if is_segmented(entry.component)
        }
        layout = self._plan(share.tensors)
        for component, tensors in share.owned:
            guard.watch(component, tensors)
        manifest = Manifest(
            name=name,
            # The experience has its own file; what may be long in it is packed, not copied.
            info=copy.deepcopy(replace(info, experience={})),
            created_wall_s=self._clock.wall_s(),
            versions=self._versions,
            components=share.components,
            files={},
            arena_bytes=layout.size,
            arenas=self._arenas,
            features=_features(share, self._place),
            ranks=self._place.size,
        )
        _check_encodable(manifest)
        small_files = _small_files(info, share, self._place) | _legacy_files(share)
        sums = arena.fill(layout, share.tensors)
        guard.compare()
        return Snapshot(manifest, arena, layout, small_files, segments, sums, share.agreement)

    def size_of(self, entries: tuple[Entry, ...]) -> int:
        """Bytes of an arena that holds a copy of the components as they are now.

        Raises:
            ConfigError: A component holds something a checkpoint cannot store.
        """
        return self._plan(self._share(entries).tensors).size

    def agreement(self, entries: tuple[Entry, ...]) -> Mapping[str, str]:
        """Component → digest of what must be the same on all ranks; empty if there is one.

        Raises:
            ConfigError: A component holds something a checkpoint cannot store.
        """
        return self._share(entries).agreement

    def _share(self, entries: tuple[Entry, ...]) -> Share:
        named = self._place.named(entries)
        return share_of(
            named, {entry.name: entry.component.state() for entry in named}, self._place
        )

    def _plan(self, tensors: Mapping[str, Mapping[str, Any]]) -> ArenaLayout:
        seen = {
            path: {name: _type_and_shape(tensor) for name, tensor in named.items()}
            for path, named in tensors.items()
        }
        if seen != self._seen:
            self._layout = plan({path: _describe(path, named) for path, named in tensors.items()})
            self._seen = seen
        return self._layout


def _features(share: Share, place: RankPlace) -> tuple[str, ...]:
    legacy = any(entry.legacy_file for entry in share.components.values())
    grouped = any(entry.tensor_prefix for entry in share.components.values())
    return (
        (LEGACY_FEATURE,) * legacy
        + (RANKS_FEATURE,) * (place.size > 1)
        + (GROUPED_FEATURE,) * grouped
    )


def _legacy_files(share: Share) -> dict[str, bytes]:
    return {
        share.components[name].legacy_file: state.legacy
        for name, state in share.states.items()
        if state.legacy is not None
    }


def _type_and_shape(tensor: Any) -> tuple[Any, Any]:
    """As long as it stays the same, so does the place in the file; None for what is no tensor."""
    return getattr(tensor, "dtype", None), getattr(tensor, "shape", None)


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Versions of Python and of the libraries whose arithmetic or formats matter."""
    versions = {"python": platform.python_version()}
    for library in ("perdure", "numpy", "torch", "msgpack", "safetensors"):
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "absent"
    return MappingProxyType(versions)


def _check_encodable(manifest: Manifest) -> None:
    try:
        manifest.check()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot be written to a manifest ({error})",
            where=f"checkpoint {manifest.name.directory}",
            rule="clocks, lineage, metric and environment are plain numbers and text",
            way_out="convert them before staging",
        ) from error


def _describe(path: str, tensors: Mapping[str, Any]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for name, tensor in tensors.items():
        try:
            specs[name] = spec_of(tensor)
        except ValueError as error:
            raise ConfigError(
                str(error),
                where=f"tensor {name!r} of {path}",
                rule="a checkpoint stores dense tensors of plain number types",
                way_out="convert it in the component's state()",
            ) from error
    return specs


def _small_files(info: StagedInfo, share: Share, place: RankPlace) -> dict[str, bytes]:
    packed = {key: _pack(dict(state.values), where=key) for key, state in share.states.items()}
    file = state_file(place)
    states = {file: _pack({"format": FORMAT, "components": packed}, where=file)}
    if not place.leads:
        return states if packed else {}
    position = info.position
    experience = {
        "format": FORMAT,
        "position": [position.incarnation, position.segment, position.offset],
        "experience": dict(info.experience),
    }
    return {**states, EXPERIENCE_FILE: _pack(experience, where=EXPERIENCE_FILE)}


def _pack(value: object, *, where: str) -> bytes:
    try:
        return msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"small values cannot be stored ({error})",
            where=where,
            rule="values are numbers, text, bytes, lists and mappings",
            way_out="convert them in the component's state()",
        ) from error
