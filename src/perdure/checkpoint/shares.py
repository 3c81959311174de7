"""What one rank stores of a checkpoint that several ranks make together.

Tensors that are spread over ranks are stored in parts, each by one rank. Everything else is the
same on every rank and stored by rank 0, except components that every rank has a state of its own
of: those of rank 0 keep their name, that of rank ``r`` is ``<name>/rank-<r>``.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import xxhash

from perdure.checkpoint.arena import spec_of
from perdure.checkpoint.layout import RESERVED, TensorSpec
from perdure.checkpoint.manifest import STATE_FILE, ComponentEntry
from perdure.checkpoint.registry import Entry
from perdure.checkpoint.sharded import ShardedTensor, StoredPart, shard_file
from perdure.core.boxes import Box
from perdure.core.components import ComponentState, Segmented, Shard
from perdure.core.errors import ConfigError

GROUP_FROM = 32
"""Small tensor files that a rank would have to store before it puts them together."""
SMALL_BYTES = 1 << 20
SMALL_FILE = "small.safetensors"
_OF_RANK = re.compile(r"(.+)/rank-([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which of how many ranks this process is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether it claims the run, writes the manifest and commits."""
        return self.rank == 0

    def name_of(self, component: str) -> str:
        """The name under which this rank stores a state of its own."""
        return f"{component}/rank-{self.rank}" if self.rank else component

    def named(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        """The entries under the names that this rank stores and loads them by."""
        return tuple(
            replace(entry, name=self.name_of(entry.name)) if entry.per_rank else entry
            for entry in entries
        )


ALONE = RankPlace()


def split_name(component: str) -> tuple[str, int]:
    """The registered name and the rank of a component that may be a rank's own."""
    match = _OF_RANK.fullmatch(component)
    return (match[1], int(match[2])) if match else (component, 0)


@dataclass(slots=True)
class Share:
    """What a rank stores.

    Attributes:
        components: Manifest entries; of shared components without what rank 0 alone stores.
        tensors: File → tensor name → live tensor or part.
        owned: Component and its tensors of one file, live.
        states: The states whose small values and pickles this rank stores.
        agreement: Shared component → digest of what must be the same on all ranks.
    """

    components: dict[str, ComponentEntry] = field(default_factory=dict[str, ComponentEntry])
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    owned: list[tuple[str, Mapping[str, Any]]] = field(
        default_factory=list[tuple[str, Mapping[str, Any]]]
    )
    states: dict[str, ComponentState] = field(default_factory=dict[str, ComponentState])
    agreement: dict[str, str] = field(default_factory=dict[str, str])


def share_of(
    entries: Sequence[Entry], states: Mapping[str, ComponentState], place: RankPlace
) -> Share:
    """Divide the states: what this rank stores of them.

    Args:
        entries: Components under the names they are stored by (:meth:`RankPlace.named`).
        states: Their states by these names.
        place: Which rank this is.

    Raises:
        ConfigError: Something cannot be stored by several ranks.
    """
    share = Share()
    for entry in entries:
        _add(share, entry, states[entry.name], place)
    _group_small(share, place)
    return share


def _add(share: Share, entry: Entry, state: ComponentState, place: RankPlace) -> None:
    _refuse(entry, state, place)
    mine = entry.per_rank or place.leads
    whole: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    shards: dict[str, ShardedTensor] = {}
    sharded: list[str] = []
    for name, tensor in state.tensors.items():
        held = as_shard(tensor)
        if held is None or place.size == 1:
            whole[name] = tensor if held is None else _only_part(entry.name, name, held)
            continue
        if entry.per_rank:
            raise _spread(entry.name, name)
        spec = _whole_spec(entry.name, name, held)
        sharded.append(f"{name} {spec}")
        if held.stored and held.box.volume:
            parts[name] = held.data
            shards[name] = ShardedTensor(spec, (StoredPart(place.rank, held.box),))
    if mine:
        share.states[entry.name] = state
    tensor_file = entry.tensor_file if mine and whole else ""
    for file, tensors in (
        (tensor_file, whole if mine else {}),
        (shard_file(entry.tensor_file, place.rank, place.size), parts),
    ):
        if tensors:
            share.tensors[file] = tensors
            share.owned.append((entry.name, tensors))
    share.components[entry.name] = ComponentEntry(
        entry.kind,
        entry.component.schema_version,
        tensor_file,
        entry.legacy_file if mine and state.legacy is not None else "",
        state_file(place) if entry.per_rank else STATE_FILE,
        shards,
    )
    if place.size > 1 and not entry.per_rank:
        share.agreement[entry.name] = _digest(state, whole, sharded)


def _group_small(share: Share, place: RankPlace) -> None:
    """Put small tensor files together: each costs a sync and, shipped, requests of its own."""
    small = {
        name: entry
        for name, entry in share.components.items()
        if entry.tensor_file and _bytes_of(share.tensors[entry.tensor_file]) <= SMALL_BYTES
    }
    if len(small) < GROUP_FROM:
        return
    together: dict[str, Any] = {}
    file = SMALL_FILE if place.leads else f"small.{place.rank}-of-{place.size}.safetensors"
    for name, entry in small.items():
        # No name of a component has a colon.
        prefix = f"{name}:"
        tensors = share.tensors.pop(entry.tensor_file)
        together |= {prefix + key: tensor for key, tensor in tensors.items()}
        share.components[name] = replace(entry, tensor_file=file, tensor_prefix=prefix)
    share.tensors[file] = together


def _bytes_of(tensors: Mapping[str, Any]) -> float:
    """Bytes of all elements; infinite if one is no tensor, which is refused later, by its name."""
    try:
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors.values())
    except AttributeError:
        return math.inf


def state_file(place: RankPlace) -> str:
    """Where a rank puts the small values of states of its own."""
    return STATE_FILE if place.leads else f"state.{place.rank}-of-{place.size}.msgpack"


def as_shard(tensor: Any) -> Shard | None:
    """The part that a tensor is of a larger one; None if it is a tensor by itself."""
    if isinstance(tensor, Shard):
        return tensor
    if isinstance(tensor, np.ndarray) or "torch.distributed.tensor" not in sys.modules:
        return None
    return torch_shards().shard_of(tensor)


def placed(like: Any, load: Callable[[Box | None], Any]) -> Any:
    """A stored tensor as a live one is: the same part of it, or all.

    Args:
        like: The live tensor; None or a tensor by itself: all of the stored one.
        load: Reads a part, or all.
    """
    held = as_shard(like)
    if held is None:
        return load(None)
    if isinstance(like, Shard):
        return replace(held, data=load(held.box))
    return torch_shards().with_part(like, load(held.box))


@functools.cache
def torch_shards() -> ModuleType:
    """The half of this module that knows torch's distributed tensors."""
    return importlib.import_module("perdure.checkpoint.torch_shards")


def _only_part(component: str, name: str, held: Shard) -> Any:
    if held.box != Box.whole(held.shape):
        raise ConfigError(
            f"tensor {name} is the part {list(held.box.sizes)} of {list(held.shape)}, and this"
            " process saves alone",
            where=f"component {component}",
            rule="a checkpoint holds whole tensors: all ranks that have parts save together",
            way_out="give the engine the process group: process_group=dist.group.WORLD",
        )
    return held.data


def _whole_spec(component: str, name: str, held: Shard) -> TensorSpec:
    try:
        return TensorSpec(spec_of(held.data).code, held.shape)
    except ValueError as error:
        raise ConfigError(
            str(error),
            where=f"tensor {name!r} of component {component}",
            rule="a checkpoint stores dense tensors of plain number types",
            way_out="convert it in the component's state()",
        ) from error


def _spread(component: str, name: str) -> ConfigError:
    return ConfigError(
        f"tensor {name} is spread over the ranks",
        where=f"component {component}",
        rule="what every rank has for itself cannot be a part of something common",
        way_out="register it without per_rank",
    )


def _refuse(entry: Entry, state: ComponentState, place: RankPlace) -> None:
    if RESERVED in state.tensors:
        raise ConfigError(
            f"a tensor of it is called {RESERVED}",
            where=f"component {entry.name}",
            rule="safetensors keeps this name for itself: the tensor could not be read back",
            way_out="call the parameter or the key something else",
        )
    if state.legacy is not None and not entry.legacy:
        raise ConfigError(
            "its state holds a pickle",
            where=f"component {entry.name}",
            rule="nothing is pickled that was not registered with legacy=True",
            way_out="register it so, or store tensors and plain values",
        )
    if place.size > 1 and isinstance(entry.component, Segmented):
        raise ConfigError(
            f"is stored as segments, and {place.size} ranks save together",
            where=f"component {entry.name}",
            rule="segments are stored by a process that saves alone",
            way_out="keep it in an engine of its own, one run directory a rank",
        )


def _digest(state: ComponentState, whole: Mapping[str, Any], sharded: Sequence[str]) -> str:
    """Of small values, and of names, types and shapes of tensors; not of their elements."""
    try:
        values = msgpack.packb(dict(state.values))
    except (TypeError, ValueError, OverflowError):
        # The rank that stores them says what is wrong with them.
        values = b""
    tensors = [f"{name} {one.dtype} {tuple(one.shape)}" for name, one in whole.items()]
    return xxhash.xxh3_128_hexdigest(values + "\n".join(sorted([*tensors, *sharded])).encode())
