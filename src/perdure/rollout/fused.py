"""The transformer over a cache in as few operators as plain PyTorch allows (CPU, float32).

It computes what ``Transformer`` computes, up to rounding. At the sizes a CPU trains, an operator
costs about as much as its arithmetic, so buffers and views are made once per number of rows,
operators write into them, and what can be prepared is prepared when weights are loaded
(:mod:`perdure.rollout.fused_layer`).

Legend: N rows (tokens of one step or of a prefill), B prompts, D hidden size, H query heads,
G key-value heads, R = H / G, C head size, T tokens, L attention length, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from perdure.models.transformer import (
    ModelConfig,
    Transformer,
    rotary_table,
)
from perdure.rollout.forward import Bands
from perdure.rollout.fused_layer import FusedLayer, scale_of
from perdure.rollout.kv_cache import KVCache
from perdure.rollout.products import Product

ALIGNED_FLOATS = 16
"""A cache line."""


class FusedForward:
    """``rollout.forward.CachedForward`` for float32 on the CPU.

    Args:
        model: Weights; :meth:`refresh` must follow every change of them.
        cache: Its keys get channels in ``fused_layer.channel_order``.
        placeless: A row's bits must not depend on its place among the rows.
    """

    def __init__(self, model: Transformer, cache: KVCache, *, placeless: bool = False) -> None:
        self._model, self._cache = model, cache
        config = self._config = model.config
        self._layers = [FusedLayer(block, config, placeless=placeless) for block in model.blocks]
        head = model.embed if model.lm_head is None else model.lm_head
        self._head = Product(head.weight, placeless=placeless)
        self._norm_scale_D = torch.empty(config.hidden_size)
        cos, sin = rotary_table(config, torch.device("cpu"))
        half = config.head_dim // 2
        self._rotary_PC = torch.stack((cos[:, half:], sin[:, half:]), dim=-1).flatten(1)
        self._head_floor = config.head_dim * config.rms_norm_eps
        self._span_T = torch.arange(cache.max_tokens)
        self._buffers = _Buffers(config, cache.slots)
        self._rows: dict[int, _Rows] = {}
        self._seen = _Seen(cache)

    @property
    def held(self) -> list[Tensor]:
        """Copies of weights, beside the model's own."""
        found = list(self._head.copies)
        for layer in self._layers:
            found.append(layer.qkv.weight)
            found += [copy for product in layer.products for copy in product.copies]
        return found

    def refresh(self) -> None:
        """Take over the weights that the model holds now."""
        scale_of(self._model.norm, self._norm_scale_D)
        self._head.renew()
        for layer in self._layers:
            layer.refresh()

    def step(self, tokens_N: Tensor, positions_N: Tensor, bands: Bands) -> Tensor:
        """Logits (N, V) behind one new token in each of the first N slots; see the protocol."""
        rows = self._rows_of(len(tokens_N))
        self._seen.look_at(rows, bands)
        self._enter(rows, tokens_N, positions_N)
        whole_mask = self._mask(positions_N, max(length for _, length in bands))
        masks = [whole_mask[band.products, :, : band.length] for band in self._seen.bands]
        places = (rows.numbers_N, positions_N)
        for index, layer in enumerate(self._layers):
            self._project(layer, rows)
            write_keys, write_values = self._cache.writable[index]
            write_keys.index_put_(places, rows.k_NGC)
            write_values.index_put_(places, rows.v_NGC)
            for band, mask in zip(self._seen.bands, masks, strict=True):
                keys, values = band.layers[index]
                scores = torch.baddbmm(mask, band.q, keys, alpha=rows.scale, out=band.scores)
                torch.softmax(scores, -1, out=scores)
                torch.bmm(scores, values, out=band.mixed)
            self._leave(layer, rows)
        self._normalize(rows).mul_(self._norm_scale_D)
        return self._head(rows.normed_ND, rows.logits_NV)

    def prefill(self, tokens_BT: Tensor, slots_M: Tensor, sources_M: Tensor) -> None:
        """Fill slots with prompts; see the protocol."""
        prompts, length = tokens_BT.shape
        rows = self._rows_of(tokens_BT.numel())
        self._enter(rows, tokens_BT.flatten(), self._span_T[:length].repeat(prompts))
        attend = self._cache.prefill_attention(slots_M, sources_M)
        mixed = rows.mixed_NX.view(prompts, length, self._config.heads, -1)
        q_BTHC = rows.q_NGRC.view(prompts, length, self._config.kv_heads, -1, rows.size)
        for index, layer in enumerate(self._layers):
            self._project(layer, rows)
            k_BGTC = rows.k_NGC.unflatten(0, (prompts, length)).transpose(1, 2)
            v_BGTC = rows.v_NGC.unflatten(0, (prompts, length)).transpose(1, 2)
            q_BHTC = q_BTHC.flatten(2, 3).transpose(1, 2)
            mixed.copy_(attend(index, q_BHTC, k_BGTC, v_BGTC).transpose(1, 2))
            self._leave(layer, rows)

    def _rows_of(self, count: int) -> _Rows:
        """Room for a pass over so many tokens; more than slots get memory of their own."""
        if count > self._cache.slots:
            return _Rows(count, _Buffers(self._config, count, logits=False))
        rows = self._rows.get(count)
        if rows is None:
            rows = self._rows[count] = _Rows(count, self._buffers)
        return rows

    def _enter(self, rows: _Rows, tokens_N: Tensor, positions_N: Tensor) -> None:
        torch.index_select(self._model.embed.weight, 0, tokens_N, out=rows.hidden_ND)
        torch.index_select(self._rotary_PC, 0, positions_N, out=rows.rotary_NC)

    def _mask(self, positions_N: Tensor, length: int) -> Tensor:
        """0 up to a row's position, -inf behind it: (N·G, 1, L)."""
        beyond_NL = torch.gt(self._span_T[:length], positions_N[:, None])
        whole = beyond_NL[:, None, :].expand(-1, self._config.kv_heads, -1)
        return torch.where(whole, -torch.inf, 0.0).view(-1, 1, length)

    def _normalize(self, rows: _Rows) -> Tensor:
        """x / (√D · rms(x)); the scale that follows holds the √D."""
        norm_N1 = torch.linalg.vector_norm(rows.padded, 2, -1, True, out=rows.norm_N1)
        return torch.div(rows.hidden_ND, norm_N1, out=rows.normed_ND)

    def _project(self, layer: FusedLayer, rows: _Rows) -> None:
        """Rotated queries and keys, and values, in their views of ``rows``."""
        projected = layer.qkv(self._normalize(rows), rows.qkv)
        if projected is not rows.qkv:
            rows.qkv.copy_(projected)
        if layer.head_scale_RC is not None:
            norm = torch.linalg.vector_norm(rows.qk, 2, -1, True, out=rows.head_norm)
            norm.square_().add_(self._head_floor).sqrt_()
            rows.qk.div_(norm).mul_(layer.head_scale_RC)
        rows.qk_pairs.mul_(rows.rotary_pairs)

    def _leave(self, layer: FusedLayer, rows: _Rows) -> None:
        """Add what attention mixed and what the feed-forward layer makes of it."""
        layer.out.add_to(rows.hidden_ND, rows.mixed_NX)
        normed_ND = self._normalize(rows).mul_(layer.mlp_scale_D)
        both = layer.gate_up(normed_ND, rows.gate_up)
        gate, up = rows.halves if both is rows.gate_up else both.chunk(2, -1)
        torch.mul(functional.silu(gate, inplace=True), up, out=rows.inner)
        layer.down.add_to(rows.hidden_ND, rows.inner)


class _Buffers:
    """Memory for a number of rows; fewer rows use the front of it."""

    def __init__(self, config: ModelConfig, count: int, *, logits: bool = True) -> None:
        self.config = config
        size, width = config.head_dim, config.hidden_size
        queries = config.heads * size
        # The length of a padded row is √(x² + D·eps): a norm needs no operators for its eps.
        padding = ALIGNED_FLOATS + -width % ALIGNED_FLOATS
        self.padded = torch.full(
            (count, width + padding), math.sqrt(width * config.rms_norm_eps / padding)
        )
        self.normed = torch.empty(count, width)
        self.norm = torch.empty(count, 1)
        self.rotary = torch.empty(count, size)
        self.qkv = torch.empty(count, queries + 2 * config.kv_heads * size)
        self.head_norm = torch.empty(count, config.heads + config.kv_heads)
        self.mixed = torch.empty(count, queries)
        self.gate_up = torch.empty(count, 2 * config.intermediate_size)
        self.inner = torch.empty(count, config.intermediate_size)
        self.logits = torch.empty(count, config.vocab_size) if logits else torch.empty(0, 0)


class _Rows:
    """The buffers' first N rows, and every view of them that a pass uses."""

    def __init__(self, count: int, buffers: _Buffers) -> None:
        config = buffers.config
        groups, size = config.kv_heads, config.head_dim
        per_group = config.heads // groups
        self.size, self.scale = size, size**-0.5
        self.numbers_N = torch.arange(count)
        self.padded = buffers.padded[:count]
        self.hidden_ND = self.padded[:, : config.hidden_size]
        self.normed_ND, self.norm_N1 = buffers.normed[:count], buffers.norm[:count]
        self.rotary_NC = buffers.rotary[:count]
        self.rotary_pairs = torch.view_as_complex(self.rotary_NC.view(count, 1, 1, -1, 2))
        self.qkv = buffers.qkv[:count]
        heads = self.qkv.view(count, groups, per_group + 2, size)
        self.qk, self.k_NGC, self.v_NGC = heads[:, :, :-1], heads[:, :, -2], heads[:, :, -1]
        self.qk_pairs = torch.view_as_complex(self.qk.unflatten(-1, (-1, 2)))
        self.head_norm = buffers.head_norm[:count].view(count, groups, -1, 1)
        self.q_NGRC = heads[:, :, :per_group]
        self.q = self.qkv.view(count * groups, per_group + 2, size)[:, :per_group]
        self.mixed_NX = buffers.mixed[:count]
        self.mixed = self.mixed_NX.view(count * groups, per_group, size)
        self.gate_up, self.inner = buffers.gate_up[:count], buffers.inner[:count]
        self.halves = self.gate_up.chunk(2, -1)
        self.logits_NV = buffers.logits[:count]


class _Band:
    """Consecutive rows that attend to the same number of positions.

    Attributes:
        products: Its part of the N·G products.
        layers: Keys (…, C, L) and values (…, L, C) of each layer.
    """

    def __init__(self, rows: _Rows, cache: KVCache, products: slice, length: int) -> None:
        self.products, self.length = products, length
        self.q, self.mixed = rows.q[products], rows.mixed[products]
        self.scores = torch.empty(0)
        self.layers = [
            (keys[products, :, :length], values[products, :length])
            for keys, values in cache.products
        ]


class _Seen:
    """What a step sees of the cache, and where its scores go; made anew when shapes change."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._memory = torch.empty(cache.slots * cache.config.heads * cache.max_tokens)
        self._shape: Bands = ()
        self.bands: list[_Band] = []

    def look_at(self, rows: _Rows, shape: Bands) -> None:
        """Make ``bands`` those of a shape."""
        if shape == self._shape:
            return
        groups = self._cache.config.kv_heads
        self._shape, self.bands, start = shape, [], 0
        for end, length in shape:
            products = slice(start * groups, end * groups)
            band = _Band(rows, self._cache, products, length)
            size = (*band.q.shape[:2], length)
            band.scores = self._memory[: math.prod(size)].view(size)
            self.bands.append(band)
            start = end
