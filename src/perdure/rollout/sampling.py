"""Choosing tokens for many rows at once, each with its own parameters and its own uniform number.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algorithms.truncation import left_out


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of N rows.

    Attributes:
        temperature_N: float32, positive; 1 for greedy rows. None when all are 1.
        top_k_N: int64; the vocabulary size where nothing is cut.
        top_p_N: float64; 1 where nothing is cut.
        greedy_N: bool.
        truncated_N: bool, rows with top-k or top-p; None when there are none.
        some_greedy: Whether any row is greedy.
    """

    temperature_N: Tensor | None
    top_k_N: Tensor
    top_p_N: Tensor
    greedy_N: Tensor
    truncated_N: Tensor | None
    some_greedy: bool


def sample(logits_NV: Tensor, uniform_N: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution in token-id order.

    Every operation works row by row, so a row's result is the same whatever the other rows hold.

    Args:
        logits_NV: float.
        uniform_N: float64 in [0, 1).
        rows: Parameters of each row.

    Returns:
        int64 (N,) tokens and float32 (N,) log-probabilities of the distribution drawn from.
    """
    scaled_NV = logits_NV.float()
    if rows.temperature_N is not None:
        scaled_NV = scaled_NV / rows.temperature_N[:, None]
    if rows.truncated_N is not None:
        out_NV = left_out(scaled_NV, rows.top_k_N[:, None], rows.top_p_N[:, None])
        cut_NV = out_NV & rows.truncated_N[:, None]
        scaled_NV = scaled_NV.masked_fill(cut_NV, -torch.inf)
    cdf_NV = scaled_NV.softmax(-1).cumsum(-1, dtype=torch.float64)
    # The threshold stays below the total, so that a token of probability 0 is never chosen.
    below_N1 = torch.nextafter(cdf_NV[:, -1:], cdf_NV.new_zeros(()))
    tokens_N1 = torch.searchsorted(cdf_NV, below_N1.mul_(uniform_N[:, None]), right=True)
    # Probabilities that are no numbers have no such place; the log-probability tells.
    tokens_N1.clamp_(max=cdf_NV.shape[1] - 1)
    if rows.some_greedy:
        tokens_N1 = torch.where(
            rows.greedy_N[:, None], scaled_NV.argmax(-1, keepdim=True), tokens_N1
        )
    return tokens_N1[:, 0], scaled_NV.log_softmax(-1).gather(1, tokens_N1)[:, 0]
