"""The places of a run on the cluster, and the incarnation of its controller that has them.

The head keeps a mark for each incarnation that has reserved them: those who read it find the
highest, in whatever order they were written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from perdure.core.errors import ConfigError, DamagedError, FencedError, InfrastructureError
from perdure.core.ids import IncarnationNumber
from perdure.core.rollout_api import NO_INCARNATION
from perdure.runtime.ray.cluster import NAMESPACE, PoolPlan

_HEAD_TIMEOUT_S = 10.0
"""Longest wait for what the head says of the marks. Without one, Ray waits for a head that is gone
for minutes, and then ends the process.
"""


async def reserve(
    run_id: str, plan: PoolPlan, *, incarnation: IncarnationNumber, timeout_s: float
) -> PlacementGroup:
    """Keep the places of a run; those that an earlier controller of it has kept are taken over.

    Raises:
        ConfigError: Others hold so much of the cluster that there is no room in time.
        FencedError: They belong to a higher incarnation.
        InfrastructureError: The head does not answer.
        DamagedError: What it has kept of the places cannot be read.
    """
    name, made = f"perdure-{run_id}", False
    group = _find(name)
    if group is not None:
        await _take(group, incarnation)
        if [dict(bundle) for bundle in group.bundle_specs] != plan.bundles():
            await give_back(group, incarnation=incarnation)
            group = None
    if group is None:
        group, made = placement_group(plan.bundles(), name=name, lifetime="detached"), True
    try:
        if made:
            await _take(group, incarnation)
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        failure = await _given_back(group, incarnation)
        refused = _no_room(plan, timeout_s, head_answers=failure is None)
        _note(refused, failure)
        raise refused from None
    except BaseException as error:
        if made:
            _note(error, await _given_back(group, incarnation))
        raise
    return group


async def give_back(group: PlacementGroup, *, incarnation: IncarnationNumber) -> None:
    """The places are free, and what runs in them ends; those of somebody else are left alone.

    Raises:
        InfrastructureError: The head does not answer.
        DamagedError: What it has kept of the places cannot be read.
    """
    if await _owner(group) in (incarnation, NO_INCARNATION):
        remove_placement_group(group)
        await _ask(_head().internal_kv_del, _mark(group), True)


async def _given_back(group: PlacementGroup, incarnation: IncarnationNumber) -> Exception | None:
    """:func:`give_back` because of an error, which stays the one that counts; why it failed."""
    try:
        await give_back(group, incarnation=incarnation)
    except Exception as failure:  # noqa: BLE001 - the caller raises another error, with this one
        return failure
    return None


def _note(error: BaseException, failure: Exception | None) -> None:
    if failure is not None:
        error.add_note(f"The places could not be given back: {failure}")


def _no_room(plan: PoolPlan, timeout_s: float, *, head_answers: bool) -> ConfigError:
    # Of a head that is gone Ray waits for an answer for a minute, and then ends the process.
    free = f"; free are {ray.available_resources().get('CPU', 0):g} CPUs" if head_answers else ""
    return ConfigError(
        f"no room for {plan.cpus} CPUs within {timeout_s:g} s{free}",
        where="ray runtime",
        rule="learner and engines have places of their own",
        way_out="end what holds the cluster (`ray status` shows it), or add nodes",
    )


def _find(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _head() -> Any:
    """Keeps the marks."""
    return internal_kv_get_gcs_client()


async def _ask(call: Callable[..., Any], *arguments: object) -> Any:
    """What the head answers to a call about marks; the event loop goes on meanwhile."""
    namespace = NAMESPACE.encode()
    try:
        return await asyncio.to_thread(call, *arguments, namespace, timeout=_HEAD_TIMEOUT_S)
    except RayError as error:
        raise InfrastructureError(
            f"the head of the cluster has not answered within {_HEAD_TIMEOUT_S:g} s ({error})",
            where="ray runtime",
            rule="the head keeps who has the places of a run",
            way_out="start it again and resume the run, there or with another ray.address or"
            " runtime=local",
        ) from error


async def _take(group: PlacementGroup, incarnation: IncarnationNumber) -> None:
    await _ask(_head().internal_kv_put, _mark(group, incarnation), b"", True)
    if (owner := await _owner(group)) != incarnation:
        raise FencedError(
            f"the places belong to incarnation {owner}",
            where=f"incarnation {incarnation}",
            rule="the highest incarnation of a run has its places",
            way_out="another process goes on with the run; end this one",
        )


async def _owner(group: PlacementGroup) -> IncarnationNumber:
    """The highest that has taken the places; 0: nobody has yet, or they were given back."""
    prefix = _mark(group)
    marks: list[bytes] = await _ask(_head().internal_kv_keys, prefix)
    numbers = [mark.removeprefix(prefix) for mark in marks]
    for number in numbers:
        if not number.isdigit():
            raise DamagedError(
                f"the mark {number!r} of the places {group.id.hex()} is no incarnation",
                where="head of the cluster",
                rule="who takes the places of a run leaves the number of the incarnation",
                way_out="remove the run's placement group (`ray.util.remove_placement_group`) or"
                " start the cluster again, then resume the run",
            )
    return IncarnationNumber(max(map(int, numbers), default=NO_INCARNATION))


def _mark(group: PlacementGroup, incarnation: IncarnationNumber | None = None) -> bytes:
    """Key of the mark of an incarnation; without one, what those of all begin with."""
    return f"places/{group.id.hex()}/{'' if incarnation is None else incarnation}".encode()
