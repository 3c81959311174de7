"""A decoder-only transformer, Llama/Qwen style: RMSNorm, RoPE, SwiGLU, grouped-query attention.

The learner and the embedded engine run this same code; they differ only in the ``attend`` function
they pass (causal over a batch, or over a key-value cache).

Legend: B rows, T tokens, D hidden size, V vocabulary, H query heads, G key-value heads,
C head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from perdure.core import keyed_random

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q_BHTC, k_BGTC, v_BGTC) → out_BHTC``: how queries look at keys and values."""


class ModelConfig(BaseModel):
    """Shape of a model. Every field is part of a checkpoint's meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(ge=2, description="Number of token ids.")
    hidden_size: int = Field(ge=2, description="Width of the residual stream.")
    layers: int = Field(ge=1, description="Number of blocks.")
    heads: int = Field(ge=1, description="Query heads.")
    kv_heads: int = Field(ge=1, description="Key-value heads; default: as many as query heads.")
    head_dim: int = Field(ge=2, description="Size of one head; default: hidden_size / heads.")
    intermediate_size: int = Field(ge=1, description="Width of the SwiGLU layer.")
    rope_theta: float = Field(default=10_000.0, gt=0, description="Base of the rotary frequencies.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="Added to the mean square.")
    tie_embeddings: bool = Field(default=True, description="Output layer = input embedding.")
    qkv_bias: bool = Field(default=False, description="Bias of the q, k, v projections (Qwen2).")
    qk_norm: bool = Field(default=False, description="RMSNorm of each q and k head (Qwen3).")
    max_positions: int = Field(default=512, ge=1, description="Longest sequence.")

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, given: Any) -> Any:
        """Fill ``kv_heads`` and ``head_dim`` from the fields they follow."""
        if not isinstance(given, dict):
            return given
        hidden, heads = given.get("hidden_size"), given.get("heads")
        if not (isinstance(heads, int) and heads > 0 and isinstance(hidden, int)):
            return given
        return {"kv_heads": heads, "head_dim": hidden // heads, **given}

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary embedding")
        return self


def parameter_count(config: ModelConfig) -> int:
    """How many weights a :class:`Transformer` of this shape has."""
    width = config.head_dim * (config.heads + 2 * config.kv_heads)
    attention = config.hidden_size * (width + config.heads * config.head_dim)
    extras = (width if config.qkv_bias else 0) + (2 * config.head_dim if config.qk_norm else 0)
    mlp = 3 * config.hidden_size * config.intermediate_size
    block = attention + extras + mlp + 2 * config.hidden_size
    tables = 1 if config.tie_embeddings else 2
    embeddings = tables * config.vocab_size * config.hidden_size
    return embeddings + config.layers * block + config.hidden_size


def causal_attention(layer: int, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor) -> Tensor:
    """Each position sees itself and what lies before it in its row."""
    del layer
    return functional.scaled_dot_product_attention(
        q_BHTC, k_BGTC, v_BGTC, is_causal=True, enable_gqa=q_BHTC.shape[1] != k_BGTC.shape[1]
    )


def rotary_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Cosines and signed sines, float32 (2, max_positions, C).

    Su et al. 2021 (arXiv:2104.09864, eq. 34) in the two-halves layout; the sine of the first half
    is negated, so that rotating is ``x * cos + swap_halves(x) * sin``.
    """
    half = config.head_dim // 2
    # Built once and kept: it must serve autograd even if the first caller is in inference mode.
    with torch.inference_mode(False):
        exponents = torch.arange(half, dtype=torch.float32) * 2 / config.head_dim
        frequencies = 1.0 / torch.pow(torch.tensor(config.rope_theta), exponents)
        angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))).to(device)


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019 (arXiv:1910.07467, eq. 4), over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; q, k and v come from one fused projection, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=False)
        norm = config.qk_norm
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if norm else None

    def forward(self, x_BTD: Tensor, rotary: Tensor, layer: int, attend: Attend) -> Tensor:
        rows, tokens, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(rows, tokens, -1, self.head_dim)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        cos, sin = rotary[0], rotary[1]
        qk = (qk * cos + qk.roll(self.head_dim // 2, -1) * sin).to(v.dtype).transpose(1, 2)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        mixed = attend(layer, q, k, v.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class SwiGLU(nn.Module):
    """Shazeer 2020 (arXiv:2002.05202, eq. 6); gate and up come from one fused projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU with residual connections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BTD: Tensor, rotary: Tensor, layer: int, attend: Attend) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, layer, attend)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Transformer(nn.Module):
    """Token ids in, hidden states out; :meth:`logits` turns those one wants into logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._rotary: Tensor | None = None

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions: Tensor | None = None,
        attend: Attend = causal_attention,
    ) -> Tensor:
        """Hidden states after the final norm, (B, T, D).

        Rows shorter than T are padded on the *right* with any token id: attention is causal, so
        padding never reaches a real position and no mask is needed. States at padded positions are
        meaningless.

        Args:
            tokens_BT: int64 or int32.
            positions: int64 (T,) or (B, T); default 0 … T-1.
            attend: Attention over this batch (default) or over a cache.

        Raises:
            ValueError: T exceeds ``max_positions`` (checked when positions are not given).
        """
        hidden_BTD = self.embed(tokens_BT)
        rotary = self._rotary_at(tokens_BT, positions)
        for layer, block in enumerate(self.blocks):
            hidden_BTD = block(hidden_BTD, rotary, layer, attend)
        return self.norm(hidden_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of hidden states (…, D); pass only the positions you need."""
        head = self.embed if self.lm_head is None else self.lm_head
        return functional.linear(hidden, head.weight)

    def _rotary_at(self, tokens_BT: Tensor, positions: Tensor | None) -> Tensor:
        """Cosines and sines broadcastable over heads, (2, 1 or B, T, 1, C)."""
        whole = self._rotary
        if whole is None or whole.device != tokens_BT.device:
            whole = self._rotary = rotary_table(self.config, tokens_BT.device)
        if positions is not None:
            table = whole[:, positions]
        elif tokens_BT.shape[1] > self.config.max_positions:
            raise ValueError(
                f"{tokens_BT.shape[1]} tokens exceed max_positions {self.config.max_positions}"
            )
        else:
            table = whole[:, : tokens_BT.shape[1]]
        return table.unsqueeze(-2) if table.dim() == 4 else table[:, None, :, None]


class ValueModel(nn.Module):
    """A transformer trunk with a scalar head: one value estimate per position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = Transformer(config.model_copy(update={"tie_embeddings": True}))
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Values (B, T); the value at position t has seen tokens 0 … t."""
        return self.head(self.trunk(tokens_BT)).squeeze(-1)


def init_weights(model: nn.Module, seed: int) -> None:
    """Draw every weight from a stream keyed by (seed, parameter name); same seed, same bits.

    Matrices: normal with variance 1 / fan-in, those that write into the residual stream divided by
    ``sqrt(2 · layers)`` (Radford et al. 2019, §2.3); embeddings: standard deviation 0.02; norms: 1;
    biases and value heads: 0.
    """
    depth = sum(isinstance(module, Block) for module in model.modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or name == "head.weight":
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            draws = keyed_random.generator(seed, f"init:{name}").standard_normal(parameter.shape)
            parameter.copy_(torch.from_numpy(draws * _init_scale(name, parameter, depth)))


def _init_scale(name: str, parameter: Tensor, depth: int) -> float:
    if name.endswith(("embed.weight", "lm_head.weight")):
        return 0.02
    scale = 1 / math.sqrt(parameter.shape[1])
    writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return scale / math.sqrt(2 * depth) if writes_residual else scale
