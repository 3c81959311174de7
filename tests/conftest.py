"""Shared by all tests: one thread per process, Hypothesis without wall-clock deadlines."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Read by the numerical libraries when they are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from ray_cluster import Cluster, a_cluster, own_token

# Read by Ray when it is first imported. Workers of one session share it.
for name, value in own_token().items():
    os.environ.setdefault(name, value)

settings.register_profile(
    "perdure",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("perdure")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Eight cores, whatever the machine has, for the whole session."""
    with a_cluster(cpus=8) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ray_address(ray_cluster: Cluster) -> str:
    """The head of that cluster."""
    return ray_cluster.address
