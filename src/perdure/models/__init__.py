"""Models: one transformer for learner and engine, its digest, Hugging Face checkpoints."""

from perdure.models.digest import copied_weights, digest_weights, weights_of
from perdure.models.transformer import (
    ModelConfig,
    Transformer,
    ValueModel,
    init_weights,
    parameter_count,
)

__all__ = [
    "ModelConfig",
    "Transformer",
    "ValueModel",
    "copied_weights",
    "digest_weights",
    "init_weights",
    "parameter_count",
    "weights_of",
]
