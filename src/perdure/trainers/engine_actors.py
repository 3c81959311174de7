"""The engines of a run on a Ray cluster, if the recipe says so. Nothing here needs ray before."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from perdure.core.clock import Clock
from perdure.core.errors import ConfigError
from perdure.core.events import EventSink
from perdure.models import ModelConfig
from perdure.rollout import EngineOptions
from perdure.runtime.fleet import EngineSource
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.waits import waiting
from perdure.trainers.config import RunConfig
from perdure.trainers.engine_processes import engine_names

if TYPE_CHECKING:
    from perdure.runtime.ray.cluster import PoolPlan


@contextmanager
def cluster_of(config: RunConfig, *, clock: Clock, events: EventSink) -> Generator[None]:
    """Belong to the cluster of the recipe while the body runs; with the local runtime, to none.

    ``events`` hears what is waited for.

    Raises:
        ConfigError: Ray is not installed, no cluster answers, or it is too small.
    """
    if config.runtime == "local":
        yield
        return
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
    what = "Ray to start on this machine" if address is None else f"the cluster at {address}"
    with ExitStack() as stack:
        with waiting(what, clock=clock, events=events):
            from perdure.runtime.ray.cluster import joined

            stack.enter_context(joined(_plan(config), address=address))
        yield


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
