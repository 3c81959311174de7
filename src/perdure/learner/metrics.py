"""Metrics of a local update that are functions of its inputs. Legend as in ``batch.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perdure.algorithms.divergences import kl_estimate


def mismatch_metrics(rollout_M: Tensor, learner_M: Tensor) -> dict[str, float]:
    """How far the engine's log-probabilities of the tokens are from the learner's.

    ``mismatch_kl`` is the k3 estimate of KL(rollout ‖ learner); tokens were drawn from the former.
    """
    distance_M = (rollout_M - learner_M).abs()
    return {
        "mismatch_mean": float(distance_M.mean()),
        "mismatch_max": float(distance_M.max()),
        "mismatch_kl": float(kl_estimate(rollout_M, learner_M, "k3").mean()),
    }


def critic_metrics(values_M: Tensor, returns_M: Tensor) -> dict[str, float]:
    """How much of the returns' variance the critic explained before it was trained on them."""
    variance = float(torch.var(returns_M, correction=0))
    residual = float(torch.var(returns_M - values_M, correction=0))
    explained = {"explained_variance": 1 - residual / variance} if variance > 0 else {}
    return {"value_mean": float(values_M.mean()), **explained}


def only_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Leave out what is not finite (NaN differs from itself); ``skipped`` tells why it is so."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
