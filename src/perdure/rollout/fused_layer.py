"""A block's weights as the fused pass wants them.

* The projection of queries, keys and values is copied, with rows in the order ``q … q k v`` per
  key-value head and channels such that a rotary pair is one complex number: the queries of a head
  are then a view, and rotating is one product.
* The norm before that projection is multiplied into the copy.

Legend: D hidden size, H query heads, G key-value heads, R = H / G, C head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from perdure.models.transformer import Block, ModelConfig, RMSNorm
from perdure.rollout.products import Product


def channel_order(config: ModelConfig) -> Tensor:
    """int64 (C,): the channels of a head, the two of each rotary pair side by side."""
    return torch.arange(config.head_dim).view(2, -1).T.reshape(-1)


def scale_of(norm: RMSNorm, out: Tensor) -> Tensor:
    """√D · weight: what a vector of length 1 is multiplied by."""
    return torch.mul(norm.weight, math.sqrt(norm.weight.numel()), out=out)


class FusedLayer:
    """Weights of a block; those that are not copied alias the model's.

    Attributes:
        qkv: Its own copy; see above.
        head_scale_RC: Scales (R + 1, C) of a head's queries and key; None without ``qk_norm``.
        mlp_scale_D: Scale of the second norm.
    """

    def __init__(self, block: nn.Module, config: ModelConfig, *, placeless: bool) -> None:
        assert isinstance(block, Block)
        self._block = block
        self._row_order, self._channels = _row_order(config), channel_order(config)
        attention, mlp = block.attention, block.mlp
        bias = None if attention.qkv.bias is None else torch.empty_like(attention.qkv.bias)
        self.qkv = Product(torch.empty_like(attention.qkv.weight), bias, placeless=placeless)
        self.out = Product(attention.out.weight, placeless=placeless)
        self.gate_up = Product(mlp.gate_up.weight, placeless=placeless)
        self.down = Product(mlp.down.weight, placeless=placeless)
        self.products = (self.qkv, self.out, self.gate_up, self.down)
        per_group = config.heads // config.kv_heads + 1
        self.head_scale_RC = torch.empty(per_group, config.head_dim) if config.qk_norm else None
        self.mlp_scale_D = torch.empty(config.hidden_size)
        self._input_scale_D = torch.empty(config.hidden_size)

    def refresh(self) -> None:
        """Take over the weights that the block holds now."""
        for product in self.products:
            product.renew()
        attention = self._block.attention
        torch.index_select(attention.qkv.weight, 0, self._row_order, out=self.qkv.weight)
        self.qkv.weight.mul_(scale_of(self._block.attention_norm, self._input_scale_D))
        if self.qkv.bias is not None:
            torch.index_select(attention.qkv.bias, 0, self._row_order, out=self.qkv.bias)
        if self.head_scale_RC is not None:
            assert attention.q_norm is not None
            assert attention.k_norm is not None
            unit = math.sqrt(self.head_scale_RC.shape[1])
            self.head_scale_RC[:-1] = attention.q_norm.weight[self._channels] * unit
            self.head_scale_RC[-1] = attention.k_norm.weight[self._channels] * unit
        scale_of(self._block.mlp_norm, self.mlp_scale_D)


def _row_order(config: ModelConfig) -> Tensor:
    """Rows of the model's fused projection in the order ``q … q k v`` per key-value head."""
    heads = torch.arange(config.heads + 2 * config.kv_heads)
    q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads))
    grouped = torch.cat((q.view(config.kv_heads, -1), k[:, None], v[:, None]), dim=1)
    rows = grouped[..., None] * config.head_dim
    rotated, plain = channel_order(config), torch.arange(config.head_dim)
    return torch.cat((rows[:, :-1] + rotated, rows[:, -1:] + plain), dim=1).reshape(-1)
