"""Where an engine of a run is on the cluster, and how it is started and ended there."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from perdure.core.errors import EngineLostError
from perdure.core.ids import IncarnationNumber
from perdure.models import ModelConfig
from perdure.rollout import EngineOptions
from perdure.runtime.ray.cluster import NAMESPACE
from perdure.runtime.ray.engine_actor import EngineHost


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine runs and how it is called there.

    Attributes:
        name: Of the actor; a later controller finds it by that.
        group: Places kept for the run; None: anywhere.
        bundle: Which of them.
        cpus: Cores that the cluster keeps for it.
        threads: That it computes with.
        heartbeat_s: Between two signs of life.
        silence_timeout_s: Without one for so long (and a tenth more) it is lost.
        start_timeout_s: Longest wait for a place and for its start.
        orphan_timeout_s: It ends when no controller has called it for so long.
    """

    name: str
    group: PlacementGroup | None = None
    bundle: int = 0
    cpus: int = 1
    threads: int = 1
    heartbeat_s: float = 1.0
    silence_timeout_s: float = 8.0
    start_timeout_s: float = 60.0
    orphan_timeout_s: float = 3600.0


def new_actor(
    model_config: ModelConfig,
    options: EngineOptions,
    place: Placement,
    incarnation: IncarnationNumber,
) -> Any:
    """Have the cluster start an engine, for a controller that attaches to it next.

    Raises:
        ActorAlreadyExistsError: There is one of that name.
    """
    strategy = place.group and PlacementGroupSchedulingStrategy(
        place.group, placement_group_bundle_index=place.bundle
    )
    return (
        ray.remote(EngineHost)
        .options(
            name=place.name,
            namespace=NAMESPACE,
            scheduling_strategy=strategy or "DEFAULT",
            lifetime="detached",
            num_cpus=place.cpus,
            max_restarts=0,
            max_concurrency=options.slots * 4 + 16,
        )
        .remote(
            model_config,
            options,
            threads=place.threads,
            incarnation=incarnation,
            orphan_timeout_s=place.orphan_timeout_s,
        )
    )


def kill_named(name: str) -> None:
    """Have the cluster end the actor of this name, if there is one."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def lost(place: Placement, reason: str) -> EngineLostError:
    """The error of an engine that is gone, or never came."""
    return EngineLostError(
        f"engine actor {place.name} {reason}",
        where="rollout engine",
        rule="a lost engine's requests go on elsewhere",
        way_out="see `ray status` and the logs of the node it ran on",
    )
