"""Tensors that several ranks have stored in parts: what the manifest says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from perdure.checkpoint.layout import TensorSpec
from perdure.core.boxes import Box, tiling_problem


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of a tensor; it lies in the shard file of the rank that stored it."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor in parts; ``spec`` is that of the whole."""

    spec: TensorSpec
    parts: tuple[StoredPart, ...]

    def encode(self) -> dict[str, Any]:
        """Its part of the manifest."""
        parts = [[p.rank, list(p.box.offsets), list(p.box.sizes)] for p in self.parts]
        return {"dtype": self.spec.code, "shape": list(self.spec.shape), "parts": parts}

    @classmethod
    def decode(cls, item: Mapping[str, Any]) -> ShardedTensor:
        """Read :meth:`encode` back. Raises ``KeyError``, ``TypeError`` or ``ValueError``."""
        parts = tuple(
            StoredPart(int(rank), Box(_numbers(offsets), _numbers(sizes)))
            for rank, offsets, sizes in item["parts"]
        )
        return cls(TensorSpec(str(item["dtype"]), _numbers(item["shape"])), parts)

    @property
    def problem(self) -> str:
        """Why the parts are not the whole tensor; empty if they are."""
        return tiling_problem(self.spec.shape, [part.box for part in self.parts])


Shards = Mapping[str, ShardedTensor]
"""Tensor → its parts, of one component."""


def shard_file(tensor_file: str, rank: int, ranks: int) -> str:
    """The file of one rank's parts beside that of the whole tensors of a component."""
    stem = tensor_file.removesuffix(".safetensors")
    return f"{stem}.{rank}-of-{ranks}.safetensors"


def merged(shares: Sequence[Shards]) -> dict[str, ShardedTensor]:
    """The parts of all ranks together.

    Raises:
        ValueError: Two ranks mean different tensors by one name.
    """
    together: dict[str, ShardedTensor] = {}
    for shards in shares:
        for name, mine in shards.items():
            other = together.get(name)
            if other is not None and other.spec != mine.spec:
                raise ValueError(
                    f"tensor {name} is {_text(other.spec)} on one rank and {_text(mine.spec)}"
                    " on another"
                )
            parts = (*(other.parts if other else ()), *mine.parts)
            together[name] = ShardedTensor(mine.spec, parts)
    return together


def first_problem(components: Iterable[tuple[str, Shards]]) -> str:
    """The first tensor whose parts are not the whole, and why; empty if there is none."""
    for component, shards in components:
        for name, tensor in shards.items():
            if tensor.problem:
                return f"tensor {name} of {component}: {tensor.problem}"
    return ""


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in cast("Sequence[Any]", value))


def _text(spec: TensorSpec) -> str:
    return f"{spec.code} {list(spec.shape)}"
