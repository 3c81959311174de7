"""Pure tensor functions of reinforcement learning: advantages, losses, divergences."""

from perdure.algorithms.advantages import (
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    whiten,
)
from perdure.algorithms.divergences import KL_ESTIMATORS, KlEstimator, kl_estimate
from perdure.algorithms.losses import (
    AGGREGATIONS,
    Aggregation,
    SurrogateTerms,
    clipped_surrogate,
    clipped_value_loss,
    entropy,
    token_weights,
)

__all__ = [
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "Aggregation",
    "KlEstimator",
    "SurrogateTerms",
    "clipped_surrogate",
    "clipped_value_loss",
    "entropy",
    "generalized_advantages",
    "group_advantages",
    "kl_estimate",
    "leave_one_out_advantages",
    "token_weights",
    "whiten",
]
