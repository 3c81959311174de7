"""Metrics of a local update that are functions of its inputs. Legend as in ``batch.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def critic_metrics(values_M: Tensor, returns_M: Tensor) -> dict[str, float]:
    """How much of the returns' variance the critic explained before it was trained on them."""
    variance = float(torch.var(returns_M, correction=0))
    residual = float(torch.var(returns_M - values_M, correction=0))
    explained = {"explained_variance": 1 - residual / variance} if variance > 0 else {}
    return {"value_mean": float(values_M.mean()), **explained}


def only_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Leave out what is not finite (NaN differs from itself); ``skipped`` tells why it is so."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
