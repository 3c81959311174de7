"""The places of a run on the cluster, and the incarnation of its controller that has them.

The head keeps a mark for each incarnation that has reserved them: those who read it find the
highest, in whatever order they were written.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from perdure.core.errors import ConfigError, FencedError
from perdure.core.ids import IncarnationNumber
from perdure.core.rollout_api import NO_INCARNATION
from perdure.runtime.ray.cluster import NAMESPACE, PoolPlan


async def reserve(
    run_id: str, plan: PoolPlan, *, incarnation: IncarnationNumber, timeout_s: float
) -> PlacementGroup:
    """Keep the places of a run; those that an earlier controller of it has kept are taken over.

    Raises:
        ConfigError: Others hold so much of the cluster that there is no room in time.
        FencedError: They belong to a higher incarnation.
    """
    name, made = f"perdure-{run_id}", False
    group = _find(name)
    if group is not None:
        _take(group, incarnation)
        if [dict(bundle) for bundle in group.bundle_specs] != plan.bundles():
            give_back(group, incarnation=incarnation)
            group = None
    if group is None:
        group, made = placement_group(plan.bundles(), name=name, lifetime="detached"), True
    try:
        if made:
            _take(group, incarnation)
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        give_back(group, incarnation=incarnation)
        free = ray.available_resources()
        raise ConfigError(
            f"no room for {plan.cpus} CPUs within {timeout_s:g} s;"
            f" free are {free.get('CPU', 0):g} CPUs",
            where="ray runtime",
            rule="learner and engines have places of their own",
            way_out="end what holds the cluster (`ray status` shows it), or add nodes",
        ) from None
    except BaseException:
        if made:
            give_back(group, incarnation=incarnation)
        raise
    return group


def give_back(group: PlacementGroup, *, incarnation: IncarnationNumber) -> None:
    """The places are free, and what runs in them ends; those of somebody else are left alone."""
    if _owner(group) in (incarnation, NO_INCARNATION):
        remove_placement_group(group)
        _head().internal_kv_del(_mark(group), True, NAMESPACE.encode())


def _find(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _head() -> Any:
    """Keeps the marks."""
    return internal_kv_get_gcs_client()


def _take(group: PlacementGroup, incarnation: IncarnationNumber) -> None:
    mark = _mark(group, incarnation)
    _head().internal_kv_put(mark, b"", True, NAMESPACE.encode())
    if (owner := _owner(group)) != incarnation:
        raise FencedError(
            f"the places belong to incarnation {owner}",
            where=f"incarnation {incarnation}",
            rule="the highest incarnation of a run has its places",
            way_out="another process goes on with the run; end this one",
        )


def _owner(group: PlacementGroup) -> IncarnationNumber:
    """The highest that has taken the places; 0: nobody has yet, or they were given back."""
    prefix = _mark(group)
    marks = _head().internal_kv_keys(prefix, NAMESPACE.encode())
    numbers = [int(mark.removeprefix(prefix)) for mark in marks]
    return IncarnationNumber(max(numbers, default=NO_INCARNATION))


def _mark(group: PlacementGroup, incarnation: IncarnationNumber | None = None) -> bytes:
    """Key of the mark of an incarnation; without one, what those of all begin with."""
    return f"places/{group.id.hex()}/{'' if incarnation is None else incarnation}".encode()
