"""The engines of a run on a Ray cluster, if the recipe says so. Nothing here needs ray before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

from perdure.core.errors import ConfigError
from perdure.models import ModelConfig
from perdure.rollout import EngineOptions
from perdure.runtime.fleet import EngineSource
from perdure.runtime.parts import RuntimeParts
from perdure.trainers.config import RunConfig
from perdure.trainers.engine_processes import engine_names

if TYPE_CHECKING:
    from perdure.runtime.ray.cluster import PoolPlan


def cluster_of(config: RunConfig) -> AbstractContextManager[None]:
    """Belong to the cluster of the recipe while the body runs; with the local runtime, to none.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or it is too small.
    """
    if config.runtime == "local":
        return nullcontext()
    if find_spec("ray") is None:
        raise ConfigError(
            "ray is not installed",
            where="runtime = ray",
            rule="engines on a cluster are actors of Ray",
            way_out="pip install 'perdure[ray]', or set runtime=local",
        )
    from perdure.runtime.ray.token import show_token

    address = config.ray.head()
    if address is not None:
        show_token()
    from perdure.runtime.ray.cluster import joined

    return joined(_plan(config), address=address)


def engine_actors(
    config: RunConfig, shape: ModelConfig, options: EngineOptions, parts: RuntimeParts
) -> EngineSource:
    """The engines of one incarnation; :func:`cluster_of` has been entered."""
    from perdure.runtime.ray.actors import ActorOptions, EngineActors

    process = config.rollout.process
    return EngineActors(
        shape,
        options,
        parts,
        names=engine_names(config.rollout),
        plan=_plan(config),
        settings=ActorOptions(
            threads=config.threads,
            start_timeout_s=process.start_timeout_s,
            heartbeat_s=process.heartbeat_s,
            silence_timeout_s=process.silence_timeout_s,
            place_timeout_s=config.ray.place_timeout_s,
            orphan_timeout_s=config.ray.orphan_timeout_s,
        ),
    )


def _plan(config: RunConfig) -> PoolPlan:
    from perdure.runtime.ray.cluster import PoolPlan

    ray, threads = config.ray, config.threads
    return PoolPlan(
        engines=config.rollout.engines,
        cpus_per_engine=threads if ray.engine_cpus is None else ray.engine_cpus,
        learner_cpus=threads if ray.learner_cpus is None else ray.learner_cpus,
    )
