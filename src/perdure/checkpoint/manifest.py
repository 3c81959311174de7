"""The manifest: what a checkpoint is, what it holds and how every file can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.keep import Keep
from perdure.checkpoint.registry import RESTORE_ORDER, Kind, tensor_file_of
from perdure.checkpoint.sharded import ShardedTensor, Shards, first_problem, shard_file
from perdure.core import sealed_json
from perdure.core.components import StoredSegment
from perdure.core.errors import DamagedError, FutureFormatError
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition

FORMAT = 1
"""Newest manifest format this version writes and reads."""

SEGMENTS_FEATURE = "segments"
"""Required of whoever reads a checkpoint that names segments outside its directory."""

LEGACY_FEATURE = "legacy"
"""Required of whoever reads a checkpoint that holds a pickle."""

RANKS_FEATURE = "ranks"
"""Required of whoever reads a checkpoint that several ranks have stored together."""

GROUPED_FEATURE = "grouped"
"""Required of whoever reads a checkpoint in which components share a tensor file."""

CHUNKS_FEATURE = "chunks"
"""Required of whoever reads a checkpoint with a file that has checksums of its chunks only."""

FEATURES: frozenset[str] = frozenset(
    {SEGMENTS_FEATURE, LEGACY_FEATURE, RANKS_FEATURE, GROUPED_FEATURE, CHUNKS_FEATURE}
)
"""Required features this version understands; a manifest that needs another one is refused."""

CHECKPOINTS = "checkpoints"
LATEST = "latest.json"
MANIFEST = "manifest.json"
STATE_FILE = "state.msgpack"
EXPERIENCE_FILE = "experience.msgpack"


@dataclass(frozen=True, slots=True)
class StagedInfo:
    """What the run knows about the moment of staging.

    Attributes:
        position: End of the log record that the staged state stands behind; redo starts there.
        clocks: ``global_step``, ``local_update``, ``optimizer_step``, ``policy_version``.
        lineage: ``run_id``, ``incarnation``, ``parent``.
        algorithm: Name of the algorithm.
        config_digest: Fingerprint of the resolved configuration.
        dataset_digest: Fingerprint of the data.
        experience: msgpack-able: the data frontier.
        metrics: Values by which checkpoints are compared, by name.
        keep: Rules of retention of the run at this moment, if it has any.
        environment: What else the arithmetic depends on (threads, processor, mode).
    """

    position: LogPosition
    clocks: Mapping[str, int]
    lineage: Mapping[str, Any]
    algorithm: str
    config_digest: str
    dataset_digest: str
    experience: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keep: Keep | None = None


@dataclass(frozen=True, slots=True)
class ComponentEntry:
    """One stored component.

    Attributes:
        tensor_file: Of the tensors that lie in one piece; empty if there are none.
        legacy_file: Of its pickle; empty if it has none.
        state_file: Of its small values.
        shards: Tensors that ranks have stored in parts.
        tensor_prefix: Before the names of its tensors in ``tensor_file``, which it shares with
            others; empty if the file is its own.
    """

    kind: Kind
    schema_version: int
    tensor_file: str
    legacy_file: str = ""
    state_file: str = STATE_FILE
    shards: Shards = field(default_factory=dict[str, ShardedTensor])
    tensor_prefix: str = ""

    def encode(self) -> dict[str, Any]:
        """Its part of the manifest."""
        fields: dict[str, Any] = {
            "kind": self.kind,
            "schema_version": self.schema_version,
            "tensor_file": self.tensor_file,
        }
        if self.legacy_file:
            fields["legacy_file"] = self.legacy_file
        if self.state_file != STATE_FILE:
            fields["state_file"] = self.state_file
        if self.shards:
            fields["shards"] = {name: one.encode() for name, one in self.shards.items()}
        if self.tensor_prefix:
            fields["tensor_prefix"] = self.tensor_prefix
        return fields


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of ``manifest.json``; :attr:`info` leaves out the experience, which has its file."""

    name: CheckpointName
    info: StagedInfo
    created_wall_s: float
    versions: Mapping[str, str]
    components: Mapping[str, ComponentEntry]
    files: Mapping[str, FileEntry]
    arena_bytes: int
    arenas: int = 2
    """How many arenas the engine held: with ``arena_bytes``, the most memory that staging took."""
    features: tuple[str, ...] = ()
    segments: Mapping[str, tuple[StoredSegment, ...]] = field(
        default_factory=dict[str, tuple[StoredSegment, ...]]
    )
    """Component → its segments in order; they are shared with other checkpoints."""
    ranks: int = 1
    """How many ranks have stored it together."""

    def shard_file(self, component: str, rank: int) -> str:
        """The file with one rank's parts of the tensors of a component."""
        kind = self.components[component].kind
        return shard_file(tensor_file_of(component, kind), rank, self.ranks)

    @property
    def sharding_problem(self) -> str:
        """The first tensor whose parts are not the whole, and why; empty if there is none."""
        return first_problem((name, entry.shards) for name, entry in self.components.items())

    @property
    def segment_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(one.bytes for stored in self.segments.values() for one in stored)

    @property
    def bytes(self) -> int:
        """Bytes of all files, the manifest itself left out."""
        return sum(entry.bytes for entry in self.files.values())

    def with_files(self, files: Mapping[str, FileEntry]) -> Manifest:
        """The same with these files in place of those it has."""
        features = [feature for feature in self.features if feature != CHUNKS_FEATURE]
        if any(len(entry.sums) > 1 for entry in files.values()):
            features.append(CHUNKS_FEATURE)
        return replace(self, files=files, features=tuple(features))

    def encode(self) -> bytes:
        """Sealed JSON, as written to disk."""
        if not self.segments:
            return sealed_json.encode(self._fields())
        return sealed_json.encode(self._fields(), long={"segments": _packed(self.segments)})

    def check(self) -> None:
        """Raises ``TypeError`` or ``ValueError`` if it cannot be encoded."""
        sealed_json.encode(self._fields(), long={})

    def _fields(self) -> dict[str, Any]:
        """All but the segments, of which there may be hundreds."""
        info, name, position = self.info, self.name, self.info.position
        return {
            "format": FORMAT,
            "features": list(self.features),
            "name": {"phase": name.phase, "step": name.step, "incarnation": name.incarnation},
            "created_wall_s": self.created_wall_s,
            "position": [position.incarnation, position.segment, position.offset],
            "clocks": dict(info.clocks),
            "lineage": dict(info.lineage),
            "algorithm": info.algorithm,
            "config_digest": info.config_digest,
            "dataset_digest": info.dataset_digest,
            "metrics": dict(info.metrics),
            "keep": None if info.keep is None else info.keep.encode(),
            "environment": dict(info.environment),
            "versions": dict(self.versions),
            "arena_bytes": self.arena_bytes,
            "arenas": self.arenas,
            "components": {key: entry.encode() for key, entry in self.components.items()},
            "files": {path: entry.encode() for path, entry in self.files.items()},
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
        }


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Read :meth:`Manifest.encode` back.

    Args:
        data: The file's bytes.
        where: Path for error messages.

    Raises:
        DamagedError: The bytes are not a manifest.
        FutureFormatError: A newer format, or a required feature this version does not know.
    """
    value = sealed_json.decode(data, where=where, newest_format=FORMAT)
    unknown = sorted(set(value.get("features", ())) - FEATURES)
    if unknown:
        raise FutureFormatError(
            f"needs features this version does not know: {', '.join(unknown)}",
            where=where,
            rule="a checkpoint is read as a whole or not at all",
            way_out="use the perdure version that wrote it, or a newer one",
        )
    try:
        return _parse(value)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"the manifest lacks a readable field ({error})",
            where=where,
            rule="docs/formats/checkpoint.md lists its fields",
            way_out="resume from an earlier checkpoint",
        ) from error


def digest_of(data: bytes) -> str:
    """xxh3-128 hex of a file's bytes, as the ledger keeps it for a manifest."""
    return xxhash.xxh3_128_hexdigest(data)


def directory_path(directory: str) -> str:
    """Path of a checkpoint's directory below the run."""
    return f"{CHECKPOINTS}/{directory}"


def _parse(value: dict[str, Any]) -> Manifest:
    name, (incarnation, segment, offset) = value["name"], value["position"]
    keep = value.get("keep")
    info = StagedInfo(
        position=LogPosition(IncarnationNumber(int(incarnation)), int(segment), int(offset)),
        clocks={key: int(clock) for key, clock in value["clocks"].items()},
        lineage=dict(value["lineage"]),
        algorithm=str(value["algorithm"]),
        config_digest=str(value["config_digest"]),
        dataset_digest=str(value["dataset_digest"]),
        metrics={str(key): float(metric) for key, metric in value.get("metrics", {}).items()},
        environment=dict(value["environment"]),
        keep=None if keep is None else Keep.decode(keep),
    )
    return Manifest(
        name=CheckpointName(
            str(name["phase"]), int(name["step"]), IncarnationNumber(int(name["incarnation"]))
        ),
        info=info,
        created_wall_s=float(value["created_wall_s"]),
        versions=dict(value["versions"]),
        components={key: _parse_component(item) for key, item in value["components"].items()},
        files={path: FileEntry.decode(item) for path, item in value["files"].items()},
        arena_bytes=int(value["arena_bytes"]),
        arenas=int(value.get("arenas", 2)),
        features=tuple(value["features"]),
        segments={
            key: tuple(_parse_segment(item) for item in items)
            for key, items in value.get("segments", {}).items()
        },
        ranks=int(value.get("ranks", 1)),
    )


def _packed(segments: Mapping[str, tuple[StoredSegment, ...]]) -> str:
    """Canonical JSON, put together by hand: there may be hundreds of them at every save."""
    fields = (
        f"{sealed_json.canonical(component)}:[{','.join(map(_packed_one, segments[component]))}]"
        for component in sorted(segments)
    )
    return "{" + ",".join(fields) + "}"


def _packed_one(segment: StoredSegment) -> str:
    return (
        f'{{"bytes":{segment.bytes},"first":{segment.first},'
        f'"index_xxh3_128":"{segment.index_checksum}","path":{sealed_json.canonical(segment.path)},'
        f'"rows":{segment.rows},"xxh3_128":"{segment.checksum}"}}'
    )


def _parse_segment(item: dict[str, Any]) -> StoredSegment:
    return StoredSegment(
        path=str(item["path"]),
        first=int(item["first"]),
        rows=int(item["rows"]),
        bytes=int(item["bytes"]),
        checksum=str(item["xxh3_128"]),
        index_checksum=str(item["index_xxh3_128"]),
    )


def _parse_component(item: dict[str, Any]) -> ComponentEntry:
    kind = str(item["kind"])
    if kind not in RESTORE_ORDER:
        raise ValueError(f"unknown kind {kind!r}")
    return ComponentEntry(
        kind,
        int(item["schema_version"]),
        str(item["tensor_file"]),
        str(item.get("legacy_file", "")),
        str(item.get("state_file", STATE_FILE)),
        {name: ShardedTensor.decode(one) for name, one in item.get("shards", {}).items()},
        str(item.get("tensor_prefix", "")),
    )
