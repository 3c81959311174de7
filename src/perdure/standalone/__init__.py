"""The checkpoint engine alone, for any training loop. Importing this does not import torch."""

from perdure.standalone.engine import CheckpointEngine, EngineOptions
from perdure.standalone.policy import SavePolicy, every
from perdure.standalone.run import RestoredFrom

__all__ = ["CheckpointEngine", "EngineOptions", "RestoredFrom", "SavePolicy", "every"]
