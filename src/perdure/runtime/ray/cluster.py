"""Joining a cluster that has room for the learner and the engines of one run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from perdure.core.errors import ConfigError
from perdure.runtime.ray.head import answers
from perdure.runtime.ray.token import WAY_OUT, refuses_token

NAMESPACE = "perdure"
"""Of the names of actors and of what the head keeps for us."""
_ANSWER_TIMEOUT_S = 3.0
_PATIENCE = "RAY_gcs_server_port_wait_time_s"
_REFUSALS = "5"
"""One a second from a head that answers, until Ray takes them for an answer."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the pools of a run need of the cluster.

    Attributes:
        engines: Rollout engines.
        cpus_per_engine: Cores of each.
        learner_cpus: Cores kept for the learner, which works in the controller's process.
    """

    engines: int
    cpus_per_engine: int = 1
    learner_cpus: int = 1

    @property
    def cpus(self) -> int:
        """Cores in all."""
        return self.engines * self.cpus_per_engine + self.learner_cpus

    def fits(self, nodes: Sequence[float]) -> bool:
        """Whether nodes with so many cores, all of them free, have room: none is split."""

        def engines_beside(learner: int) -> float:
            """Of them all, with the learner on one of the nodes."""
            return sum(
                (cpus - (self.learner_cpus if at == learner else 0)) // self.cpus_per_engine
                for at, cpus in enumerate(nodes)
            )

        homes = [at for at, cpus in enumerate(nodes) if cpus >= self.learner_cpus]
        return any(engines_beside(home) >= self.engines for home in homes)

    def bundles(self) -> list[dict[str, float]]:
        """One for each engine, then one for the learner if it works on a node of the cluster."""
        engine = {"CPU": float(self.cpus_per_engine)}
        learner = [{"CPU": float(self.learner_cpus)}] if self.learner_cpus else []
        return [*([engine] * self.engines), *learner]


@contextmanager
def joined(plan: PoolPlan, *, address: str | None = None) -> Generator[None]:
    """Belong to the cluster at ``address``, or without one to one of its own.

    One that was joined before is used and not left. One of its own runs on this machine and ends
    with the body, or with this process.

    Raises:
        ConfigError: There is no cluster at the address, it is too small for the plan, or none can
            be started.
    """
    joins = not ray.is_initialized()
    try:
        join_cluster(plan, address=address)
        yield
    finally:
        if joins:
            ray.shutdown()


def join_cluster(plan: PoolPlan, *, address: str | None = None) -> None:
    """As :func:`joined`, to be left with ``ray.shutdown``."""
    if not ray.is_initialized():
        if address is not None and not answers(address, timeout_s=_ANSWER_TIMEOUT_S):
            raise _nobody(address, f"nobody has answered for {_ANSWER_TIMEOUT_S:g} s")
        with _handlers_kept(), _patience(address):
            _connect(address)
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    if not plan.fits(nodes):
        each = f", on nodes of {', '.join(f'{cpus:g}' for cpus in nodes)}" if nodes[1:] else ""
        raise ConfigError(
            f"{plan.cpus} CPUs are needed, the cluster has {sum(nodes):g}{each}",
            where="ray runtime",
            rule=f"{plan.engines} engines of {plan.cpus_per_engine} CPUs each, and"
            f" {plan.learner_cpus} for the learner, each of them on one node",
            way_out="lower rollout.engines or threads, add nodes, or set runtime=local",
        )


def head_address() -> str:
    """``host:port`` of the head of the joined cluster."""
    return ray.get_runtime_context().gcs_address


def _connect(address: str | None) -> None:
    try:
        # What Ray calls "local" is a new cluster, whatever else runs on this machine.
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            num_cpus=None if address else os.cpu_count(),
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    # It raises bare exceptions, and leaves the process when it gives a head up.
    except (Exception, SystemExit) as error:
        if address is not None:
            raise _nobody(address, _innermost(error)) from error
        raise ConfigError(
            f"no cluster can be started on this machine: {_innermost(error)}",
            where="runtime = ray",
            rule="without ray.address the run has a cluster of its own",
            way_out="see the logs below Ray's temporary directory, give ray.address, or set"
            " runtime=local",
        ) from error


def _innermost(error: BaseException) -> str:
    """What all of it came from, in one line."""
    while (cause := error.__cause__) is not None:
        error = cause
    return next(iter(reversed(str(error).strip().splitlines())), type(error).__name__)


def _nobody(address: str, why: str) -> ConfigError:
    if refuses_token(why):
        return ConfigError(
            f"the cluster at {address} wants a token, and was shown none or another",
            where="ray.address or RAY_ADDRESS",
            rule="a cluster that `ray start` has given a token is joined with it",
            way_out=WAY_OUT,
        )
    return ConfigError(
        f"no cluster can be joined at {address}: {why}",
        where="ray.address or RAY_ADDRESS",
        rule="the ray runtime joins a cluster that is up",
        way_out="start one with `ray start --head`, or leave both out to start one on this machine",
    )


@contextmanager
def _patience(address: str | None) -> Generator[None]:
    """A head that was there a moment ago and refuses is not asked for as long as one that starts.

    What the environment says of it stands.
    """
    if address is None or _PATIENCE in os.environ:
        yield
        return
    os.environ[_PATIENCE] = _REFUSALS
    try:
        yield
    finally:
        del os.environ[_PATIENCE]


@contextmanager
def _handlers_kept() -> Generator[None]:
    """Ray puts its own handler of SIGTERM in; ours is for an orderly stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
