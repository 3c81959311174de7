"""Rollout engines behind ``core.rollout_api.RolloutEngine``, and a pool that makes many one."""

from perdure.rollout.embedded import EmbeddedEngine
from perdure.rollout.options import EngineOptions, PoolOptions
from perdure.rollout.pool import EnginePool

__all__ = ["EmbeddedEngine", "EngineOptions", "EnginePool", "PoolOptions"]
