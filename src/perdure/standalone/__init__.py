"""The checkpoint engine alone, for any training loop. Importing this does not import torch."""

from perdure.checkpoint.keep import Keep, keep
from perdure.standalone.engine import CheckpointEngine
from perdure.standalone.options import EngineOptions
from perdure.standalone.policy import SavePolicy, every
from perdure.standalone.world import RestoredFrom

__all__ = [
    "CheckpointEngine",
    "EngineOptions",
    "Keep",
    "RestoredFrom",
    "SavePolicy",
    "every",
    "keep",
]
