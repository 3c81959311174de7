"""Settings of the ``ray`` runtime; they can be read without it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

from perdure.config import Problem, Section
from perdure.core.errors import ConfigError

_HOST_AND_PORT = re.compile(r"[^\s:/]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")


RAY_ADDRESS = "RAY_ADDRESS"
"""The environment variable that says where the head is when the recipe does not."""


class RayConfig(Section):
    """The cluster of `runtime: ray`. When an engine counts as lost, and how often it is replaced,
    is in `rollout.process`.
    """

    address: str | None = None
    """`host:port` of the head. null: what RAY_ADDRESS says, else a cluster of its own on this
    machine, which ends with the process that trains."""
    engine_cpus: Annotated[int | None, Field(ge=1)] = None
    """Cores that the cluster keeps for each engine; null: as many as `threads`, which each
    computes with."""
    learner_cpus: Annotated[int | None, Field(ge=0)] = None
    """Cores that the cluster keeps for the learner, which computes in the process that trains;
    null: as many as `threads`, 0: it runs outside the cluster's nodes."""
    place_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for cores that others hold."""
    orphan_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """An engine whose controller has been silent for so long ends and gives the places of the run
    back. Until then a resume finds it."""

    def head(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """`host:port` of the head of the cluster to join; None: the run has one of its own.

        Raises:
            ConfigError: RAY_ADDRESS says something else.
        """
        address = self.address or environment.get(RAY_ADDRESS) or None
        if address is not None and not _HOST_AND_PORT.fullmatch(address):
            raise ConfigError(
                f"no cluster can be joined at {address}",
                where=RAY_ADDRESS,
                rule="it must be host:port of the head, as `ray start --head` prints it",
                way_out=f"set {RAY_ADDRESS}=127.0.0.1:6379 or ray.address, or unset {RAY_ADDRESS}"
                " for a cluster on this machine alone",
            )
        return address

    def problems(self) -> Iterable[Problem]:
        if self.address is not None and not _HOST_AND_PORT.fullmatch(self.address):
            yield Problem(
                "address",
                self.address,
                "must be host:port of the head, as `ray start --head` prints it",
                "set address=127.0.0.1:6379, or leave it out for a cluster on this machine alone",
            )
