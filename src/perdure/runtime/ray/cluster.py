"""Joining a cluster and keeping a place in it for the learner and the engines of one run."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import ray
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from perdure.core.errors import ConfigError

_NAMESPACE = "perdure"


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the pools of a run need of the cluster.

    Attributes:
        engines: Rollout engines.
        cpus_per_engine: Cores of each.
        gpus_per_engine: Devices of each; may be a fraction.
        learner_cpus: Cores kept for the learner, which works in the controller's process.
    """

    engines: int
    cpus_per_engine: int = 1
    gpus_per_engine: float = 0.0
    learner_cpus: int = 1

    @property
    def cpus(self) -> int:
        """Cores in all."""
        return self.engines * self.cpus_per_engine + self.learner_cpus

    @property
    def gpus(self) -> float:
        """Devices in all."""
        return self.engines * self.gpus_per_engine

    def bundles(self) -> list[dict[str, float]]:
        """One for the learner, then one for each engine."""
        engine = {"CPU": float(self.cpus_per_engine)}
        if self.gpus_per_engine:
            engine["GPU"] = self.gpus_per_engine
        return [{"CPU": float(self.learner_cpus)}, *([engine] * self.engines)]


def join_cluster(plan: PoolPlan, *, address: str | None = None) -> None:
    """Connect to the cluster at ``address``, or start one on this machine alone.

    Raises:
        ConfigError: There is no cluster at the address, or it is too small for the plan.
    """
    if not ray.is_initialized():
        try:
            ray.init(
                address=address,
                namespace=_NAMESPACE,
                num_cpus=None if address else os.cpu_count(),
                include_dashboard=False if address is None else None,
                log_to_driver=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no cluster answers at {address!r}: {error}",
                where="ray.address",
                rule="the ray runtime joins a cluster that is up",
                way_out="start one with `ray start --head`, or leave ray.address out to start one"
                " on this machine",
            ) from error
    have = ray.cluster_resources()
    missing = [
        f"{need:g} {kind}s are needed, the cluster has {have.get(kind, 0):g}"
        for kind, need in (("CPU", plan.cpus), ("GPU", plan.gpus))
        if need > have.get(kind, 0)
    ]
    if missing:
        raise ConfigError(
            "; ".join(missing),
            where="ray runtime",
            rule=f"{plan.engines} engines of {plan.cpus_per_engine} CPUs each, and"
            f" {plan.learner_cpus} for the learner",
            way_out="lower rollout.engines or threads, add nodes, or set runtime=local",
        )


async def reserve(run_id: str, plan: PoolPlan, *, timeout_s: float) -> PlacementGroup:
    """Keep the places of a run; those that an earlier controller of it has kept are taken over.

    Raises:
        ConfigError: Others hold so much of the cluster that there is no room in time.
    """
    name = f"perdure-{run_id}"
    try:
        group = get_placement_group(name)
        if [dict(bundle) for bundle in group.bundle_specs] != plan.bundles():
            remove_placement_group(group)
            raise ValueError(name)
    except ValueError:
        group = placement_group(plan.bundles(), name=name, lifetime="detached")
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        free = ray.available_resources()
        raise ConfigError(
            f"no room for {plan.cpus} CPUs and {plan.gpus:g} GPUs within {timeout_s:g} s;"
            f" free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs",
            where="ray runtime",
            rule="learner and engines have places of their own",
            way_out="end what holds the cluster (`ray status` shows it), or add nodes",
        ) from None
    return group


def give_back(group: PlacementGroup) -> None:
    """The run is over: its places are free, and what runs in them ends."""
    remove_placement_group(group)
