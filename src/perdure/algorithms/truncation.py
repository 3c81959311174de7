"""Which tokens top-k and top-p leave out. Legend: N rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def left_out(scores_NV: Tensor, top_k_N1: Tensor, top_p_N1: Tensor) -> Tensor:
    """What top-k, then top-p of what is left, remove: bool (N, V).

    Top-p keeps the smallest set of most likely tokens whose probability reaches p (Holtzman et al.
    2020, arXiv:1904.09751, eq. 2). Equal scores rank by token id. Every row is treated alone.

    Args:
        scores_NV: Logits or log-probabilities, after temperature.
        top_k_N1: int64, how many tokens are kept; at least the vocabulary size keeps all.
        top_p_N1: float64; 1 keeps all.
    """
    sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(scores_NV.shape[1], device=scores_NV.device)
    beyond_k_NV = ranks_V >= top_k_N1
    probs_NV = sorted_NV.masked_fill(beyond_k_NV, -torch.inf).softmax(-1)
    before_NV = probs_NV.cumsum(-1, dtype=torch.float64) - probs_NV
    beyond_p_NV = (before_NV >= top_p_N1) & (top_p_N1 < 1)
    # The most likely token always stays, however small p is.
    beyond_NV = (beyond_k_NV | beyond_p_NV) & (ranks_V > 0)
    return torch.zeros_like(beyond_NV).scatter(1, order_NV, beyond_NV)
