"""Rollout engines behind ``core.rollout_api.RolloutEngine``."""

from perdure.rollout.embedded import EmbeddedEngine
from perdure.rollout.options import EngineOptions

__all__ = ["EmbeddedEngine", "EngineOptions"]
