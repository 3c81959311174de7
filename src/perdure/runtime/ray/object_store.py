"""Weights in the object store of the cluster: written once, read by the engines of every node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from perdure.core.errors import StorageError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import Weights
from perdure.models import copied_weights
from perdure.runtime.ray.head import require_head


class StoredWeights(Mapping[str, Any]):
    """Weights and where the cluster has them; reads as the mapping they are.

    Attributes:
        reference: Of the stored arrays.

    Raises:
        StorageError: The store does not take them.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = copied_weights(weights)
        try:
            self.reference: ObjectRef[Any] = ray.put(self._weights)
        except RayError as error:
            raise StorageError(
                f"weights cannot be stored in the cluster: {error}",
                where="object store of the ray runtime",
                rule="weights go to the engines through it",
                way_out="give it more memory (`ray start --object-store-memory`) or the node more"
                " disk, and resume the run",
            ) from error

    def __getitem__(self, name: str) -> Any:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class ObjectTransport:
    """Lays weights out in the object store. Older versions go when nobody refers to them.

    A copy is kept, so that an engine that comes between two publications gets what they all have.

    Args:
        head: Its address; without it the store is gone, and Ray ends a process that uses it.
        timeout_s: Longest wait for its answer.
    """

    def __init__(self, *, head: str, timeout_s: float) -> None:
        self._head = head
        self._timeout_s = timeout_s

    async def lay_out(
        self, version: PolicyVersion, weights: Mapping[str, Any], *, incarnation: IncarnationNumber
    ) -> Weights:
        del version, incarnation
        await require_head(self._head, timeout_s=self._timeout_s)
        return StoredWeights(weights)

    async def drop_older(self) -> None:
        """The store counts references."""

    async def close(self) -> None:
        """The store counts references."""


def stored_weights(weights: Mapping[str, Any]) -> ObjectRef[Any]:
    """Where the cluster has these weights; puts them there if need be."""
    kept = weights if isinstance(weights, StoredWeights) else StoredWeights(weights)
    return kept.reference
