"""Shared by all tests: one thread per process, Hypothesis without wall-clock deadlines."""

from __future__ import annotations

import os

# Read by the numerical libraries when they are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "perdure",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("perdure")
