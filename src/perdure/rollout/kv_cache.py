"""Keys and values of running requests in preallocated slots.

Legend: S slots, N decoding rows, B prefilled rows, T tokens, G key-value heads, C head size,
L attention length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from perdure.models.transformer import Attend, ModelConfig, causal_attention


class KVCache:
    """Preallocated (layers, S, G, max_tokens, C) keys and values.

    Positions beyond a row's end hold zeros or leftovers; they are masked, and finite, so they weigh
    exactly nothing.
    """

    def __init__(
        self, config: ModelConfig, *, slots: int, max_tokens: int, device: torch.device
    ) -> None:
        shape = (config.layers, slots, config.kv_heads, max_tokens, config.head_dim)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)

    def clear(self) -> None:
        """Forget everything (leftovers of broken weights may be non-finite)."""
        self.keys.zero_()
        self.values.zero_()

    def move(self, target_slots: Tensor, source_slots: Tensor) -> None:
        """Copy whole slots."""
        self.keys[:, target_slots] = self.keys[:, source_slots]
        self.values[:, target_slots] = self.values[:, source_slots]

    def prefill_attention(self, slots: Tensor, sources: Tensor) -> Attend:
        """Causal attention over a batch of prompts that also fills slots.

        Args:
            slots: int64 (M,), slots to fill from position 0.
            sources: int64 (M,), the row of the batch each of them takes (a prompt may serve many).
        """

        def attend(layer: int, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor) -> Tensor:
            tokens = k_BGTC.shape[2]
            self.keys[layer, :, :, :tokens][slots] = k_BGTC[sources]
            self.values[layer, :, :, :tokens][slots] = v_BGTC[sources]
            return causal_attention(layer, q_BHTC, k_BGTC, v_BGTC)

        return attend

    def decode_attention(self, positions_N: Tensor, length: int) -> Attend:
        """Attention of one new token in each of the first N slots over its slot.

        Args:
            positions_N: int64, the new token's position in its row.
            length: Positions looked at; at least the largest position + 1.
        """
        rows_N = torch.arange(len(positions_N), device=positions_N.device)
        beyond_NL = torch.arange(length, device=positions_N.device) > positions_N[:, None]
        mask = torch.zeros(beyond_NL.shape, device=positions_N.device)
        mask = mask.masked_fill_(beyond_NL, -torch.inf)[:, None, None, :]

        def attend(layer: int, q_NH1C: Tensor, k_NG1C: Tensor, v_NG1C: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[rows_N, :, positions_N] = k_NG1C[:, :, 0]
            values[rows_N, :, positions_N] = v_NG1C[:, :, 0]
            rows, heads, _, size = q_NH1C.shape
            # Heads that share keys are consecutive: one small matrix product serves them together.
            q = q_NH1C.reshape(rows, k_NG1C.shape[1], -1, size) * size**-0.5
            scores = q @ keys[:rows, :, :length].transpose(-1, -2)
            weights = functional.softmax(scores.add_(mask), dim=-1)
            return (weights @ values[:rows, :, :length]).reshape(rows, heads, 1, size)

        return attend
