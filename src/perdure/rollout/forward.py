"""What an engine asks of a model over a cache, and the model's own code doing it on any device.

Legend: N rows, B prompts, T tokens, M slots to fill, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perdure.models.transformer import Transformer
from perdure.rollout.kv_cache import KVCache

GRAPH_WARM_UPS = 2
"""Calls before a capture: libraries allocate what they need in the first ones."""

Bands = tuple[tuple[int, int], ...]
"""(end, length) of consecutive rows: those up to ``end`` attend to ``length`` positions."""


class CachedForward(Protocol):
    """The model over a cache: what fills slots, and what decodes one token in each."""

    @property
    def held(self) -> list[Tensor]:
        """Copies of weights, beside the model's own."""
        ...

    def refresh(self) -> None:
        """Take over the weights that the model holds now."""
        ...

    def prefill(self, tokens_BT: Tensor, slots_M: Tensor, sources_M: Tensor) -> None:
        """Fill slots with prompts from position 0.

        Args:
            tokens_BT: int64, prompts padded on the right; what padding fills is masked later.
            slots_M: int64, slots to fill.
            sources_M: int64, the prompt that each of them takes (a prompt may serve many).
        """
        ...

    def step(self, tokens_N: Tensor, positions_N: Tensor, bands: Bands) -> Tensor:
        """Feed one token in each of the first N slots.

        Args:
            tokens_N: int64.
            positions_N: int64, where the tokens stand; below their band's length.
            bands: Positions attended to; the last one ends at N.

        Returns:
            Logits (N, V), in a buffer that the next call may overwrite.
        """
        ...


class ModelForward:
    """The model over its cache, operator by operator."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    @property
    def held(self) -> list[Tensor]:
        return []

    def refresh(self) -> None:
        """Nothing is kept of the weights."""

    def prefill(self, tokens_BT: Tensor, slots_M: Tensor, sources_M: Tensor) -> None:
        self._model(tokens_BT, attend=self._cache.prefill_attention(slots_M, sources_M))

    def step(self, tokens_N: Tensor, positions_N: Tensor, bands: Bands) -> Tensor:
        hidden_N1D = self._model(
            tokens_N[:, None],
            positions=positions_N[:, None],
            attend=self._cache.decode_attention(positions_N, max(length for _, length in bands)),
        )
        return self._model.logits(hidden_N1D[:, 0])


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens_N: Tensor
    positions_N: Tensor
    logits_NV: Tensor


class GraphedForward(ModelForward):
    """The same, captured once per number of rows and length and replayed: no dispatch is left."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        super().__init__(model, cache)
        self._graphs: dict[Bands, _Graph] = {}

    def step(self, tokens_N: Tensor, positions_N: Tensor, bands: Bands) -> Tensor:
        if bands not in self._graphs:
            self._graphs[bands] = self._capture(tokens_N, positions_N, bands)
        step = self._graphs[bands]
        step.tokens_N.copy_(tokens_N)
        step.positions_N.copy_(positions_N)
        step.graph.replay()
        return step.logits_NV

    def _capture(self, tokens_N: Tensor, positions_N: Tensor, bands: Bands) -> _Graph:
        tokens_N, positions_N = tokens_N.clone(), positions_N.clone()
        forward = super().step
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(GRAPH_WARM_UPS):
                forward(tokens_N, positions_N, bands)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits_NV = forward(tokens_N, positions_N, bands)
        return _Graph(graph, tokens_N, positions_N, logits_NV)
