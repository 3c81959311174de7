"""Rollout engines behind ``core.rollout_api.RolloutEngine``, and a pool that makes many one."""

from perdure.rollout.embedded import EmbeddedEngine
from perdure.rollout.options import EngineOptions, PoolOptions, ProcessOptions, ReplacementOptions
from perdure.rollout.pool import EnginePool
from perdure.rollout.process_engine import ProcessEngine
from perdure.rollout.replacement import Replacements
from perdure.rollout.threads import compute_with

__all__ = [
    "EmbeddedEngine",
    "EngineOptions",
    "EnginePool",
    "PoolOptions",
    "ProcessEngine",
    "ProcessOptions",
    "ReplacementOptions",
    "Replacements",
    "compute_with",
]
