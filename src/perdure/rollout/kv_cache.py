"""Keys and values of running requests in preallocated slots.

Legend: S slots, N decoding rows, B prefilled rows, T tokens, G key-value heads, C head size,
L attention length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from perdure.models.transformer import Attend, ModelConfig, causal_attention

CACHE_LINE = 64
"""Bytes."""
_CLEARED_TOGETHER = 64
"""Positions. Of one slot the keys of a position are as far apart as the slot is long: to clear few
at a time costs as much as to clear many."""


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros; on a CPU in huge pages where the system has them (a step walks all of the cache)."""
    if device.type != "cpu" or dtype != torch.float32:
        return torch.zeros(shape, device=device, dtype=dtype)
    # NumPy asks for huge pages when it allocates much, but does not align to cache lines.
    count, spare = math.prod(shape), CACHE_LINE // 4
    memory = np.empty(count + spare, np.float32)
    start = -memory.ctypes.data % CACHE_LINE // 4
    return torch.from_numpy(memory[start : start + count]).zero_().view(shape)


class KVCache:
    """Preallocated keys (layers, S, G, C, max_tokens) and values (layers, S, G, max_tokens, C).

    Keys lie transposed, so that scores are a plain matrix product. Positions beyond a row's end
    hold zeros or leftovers; they are masked, and finite where use was noted, so they weigh exactly
    nothing.

    Args:
        config: Shape of the model.
        slots: Requests it holds.
        max_tokens: Tokens of each.
        device: Where it lies.
        dtype: Of keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        max_tokens: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        heads = (config.layers, slots, config.kv_heads)
        size = config.head_dim
        self.keys = _zeros((*heads, size, max_tokens), device, dtype)
        self.values = _zeros((*heads, max_tokens, size), device, dtype)
        self.slots, self.max_tokens = slots, max_tokens
        self._ready = 0, 0
        """Slots and tokens within which everything lies that was used since the last ``clear``."""
        self._stale = 0, 0
        """Slots and tokens within which all leftovers from before lie, if not in what is ready."""
        self.writable = [
            (keys.permute(0, 3, 1, 2), values.transpose(1, 2))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        """Keys and values of each layer as (S, max_tokens, G, C)."""
        self.products = [
            (keys.flatten(0, 1), values.flatten(0, 1))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        """Keys and values of each layer as (S·G, C, max_tokens) and (S·G, max_tokens, C)."""

    def note_use(self, slots: int, tokens: int) -> None:
        """From now on the first ``tokens`` positions of the first ``slots`` may be used.

        To be called before anything is written or read there.
        """
        ready_slots, ready_tokens = self._ready
        if slots <= ready_slots and tokens <= ready_tokens:
            return
        tokens = min(-(-tokens // _CLEARED_TOGETHER) * _CLEARED_TOGETHER, self.max_tokens)
        slots, tokens = max(slots, ready_slots), max(tokens, ready_tokens)
        stale_slots, stale_tokens = self._stale
        upto = min(tokens, stale_tokens)
        self._zero(range(ready_slots, min(slots, stale_slots)), range(upto))
        self._zero(range(min(ready_slots, stale_slots)), range(ready_tokens, upto))
        self._ready = slots, tokens

    def clear(self) -> None:
        """Forget everything (leftovers of broken weights may be non-finite).

        Takes no time: a place is cleared when it is used again.
        """
        (ready_slots, ready_tokens), (slots, tokens) = self._ready, self._stale
        self._stale = max(slots, ready_slots), max(tokens, ready_tokens)
        self._ready = 0, 0

    def _zero(self, slots: range, tokens: range) -> None:
        if slots and tokens:
            rows, positions = slice(slots.start, slots.stop), slice(tokens.start, tokens.stop)
            self.keys[:, rows, ..., positions].zero_()
            self.values[:, rows, :, positions].zero_()

    def move(self, target_slots: Sequence[int], source_slots: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of slots, pair by pair in order.

        Slices of single slots take half the time of indexing by tensors.
        """
        for cached in (self.keys[..., :length], self.values[..., :length, :]):
            for target, source in zip(target_slots, source_slots, strict=True):
                cached[:, target].copy_(cached[:, source])

    def prefill_attention(self, slots: Tensor, sources: Tensor) -> Attend:
        """Causal attention over a batch of prompts that also fills slots.

        Args:
            slots: int64 (M,), slots to fill from position 0.
            sources: int64 (M,), the row of the batch each of them takes (a prompt may serve many).
        """

        def attend(layer: int, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor) -> Tensor:
            tokens = k_BGTC.shape[2]
            self.keys[layer, ..., :tokens][slots] = k_BGTC.transpose(2, 3)[sources]
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
            write_keys, write_values = self.writable[layer]
            write_keys[rows_N, positions_N] = k_NG1C[:, :, 0]
            write_values[rows_N, positions_N] = v_NG1C[:, :, 0]
            rows, heads, _, size = q_NH1C.shape
            # Heads that share keys are consecutive: one small matrix product serves them together.
            q = q_NH1C.reshape(rows, k_NG1C.shape[1], -1, size) * size**-0.5
            scores = (q @ keys[:rows, ..., :length]).float()
            weights = functional.softmax(scores.add_(mask), dim=-1).to(values.dtype)
            return (weights @ values[:rows, :, :length]).reshape(rows, heads, 1, size)

        return attend
