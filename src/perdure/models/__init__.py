"""Models: one transformer for learner and engine, its digest, Hugging Face checkpoints."""

from perdure.models.digest import digest_weights, weights_of
from perdure.models.transformer import ModelConfig, Transformer, ValueModel, init_weights

__all__ = [
    "ModelConfig",
    "Transformer",
    "ValueModel",
    "digest_weights",
    "init_weights",
    "weights_of",
]
