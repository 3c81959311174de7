"""Names of choices, for settings; importing them loads no tensors."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
"""How token losses add up to one; see :mod:`perdure.algorithms.losses`."""

KlEstimator = Literal["k1", "k2", "k3"]
"""Estimators of the divergence per token; see :mod:`perdure.algorithms.divergences`."""

OldLogprobs = Literal["recompute", "anchor", "rollout"]
"""Which policy the clipped ratio refers to; see ``docs/algorithms.md``."""

ImportanceMode = Literal["none", "truncate", "mask"]
"""What bounds do to importance weights; see :mod:`perdure.algorithms.importance`."""

ImportanceLevel = Literal["token", "sequence"]
"""Whether an importance weight is a token's or its trajectory's."""
