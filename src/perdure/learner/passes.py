"""Forward passes over a batch. Legend as in ``batch.py``; V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from perdure.learner.batch import Piece, TokenBatch
from perdure.models import Transformer, ValueModel


def policy_logprobs(
    model: Transformer, piece: Piece, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a piece's chosen tokens (K,) and of all tokens in their place (K, V).

    Only the states that predict a chosen token are turned into logits. float32, after temperature.
    """
    hidden_KD = model(piece.tokens_BT).flatten(0, 1).index_select(0, piece.positions_K)
    logprobs_KV = torch.log_softmax(model.logits(hidden_KD).float() / temperature, dim=-1)
    return logprobs_KV.gather(1, piece.targets_K[:, None]).squeeze(1), logprobs_KV


def state_values(model: ValueModel, piece: Piece) -> Tensor:
    """Value before each chosen token, float32 (K,)."""
    return model(piece.tokens_BT).flatten().index_select(0, piece.positions_K).float()


def evaluate(
    tokens: TokenBatch,
    of_piece: Callable[[Piece], Tensor],
    *,
    limit: int,
    device: torch.device,
) -> Tensor:
    """A per-token quantity of the whole batch, float32 (M,), without gradients."""
    values_M = torch.zeros(tokens.chosen, device=device)
    with torch.no_grad():
        for piece in tokens.pieces(np.arange(tokens.rows), limit=limit, device=device):
            values_M[piece.index_K] = of_piece(piece)
    return values_M
