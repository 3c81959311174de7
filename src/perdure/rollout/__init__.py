"""Rollout engines behind ``core.rollout_api.RolloutEngine``."""

from perdure.rollout.embedded import EmbeddedEngine, EngineOptions

__all__ = ["EmbeddedEngine", "EngineOptions"]
