"""What the embedded engine holds on its device: weights and cache, and the two things it computes.

Deterministic shapes: prefill runs a constant number of rows at a padded length that depends on the
prompt alone, decoding runs every slot at the full attention length, and the rows of a product do
not know their place. So no bit of a request's result depends on what else is running.

Legend: S slots, N rows, B prompts, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.core.digests import ArraysDigest
from perdure.core.errors import TrainingError
from perdure.core.trajectories import Array
from perdure.models.digest import as_array, weights_of
from perdure.models.transformer import ModelConfig, Transformer
from perdure.rollout.forward import Bands, CachedForward, GraphedForward, ModelForward
from perdure.rollout.fused import FusedForward
from perdure.rollout.kv_cache import KVCache
from perdure.rollout.options import EngineOptions
from perdure.rollout.sampling import RowSampling, sample
from perdure.rollout.slots import BAND_ROWS, SlotTable

PREFILL_ROWS = 8
"""Rows of a deterministic prefill batch."""
PREFILL_MAX_TOKENS = 4096
"""Tokens of a prefill batch that is not deterministic, padding included: memory is bounded."""
PREFILL_TOKENS = 16
"""Shortest padded prompt; longer ones are padded to the next power of two."""
LENGTH_QUANTUM = 8
"""The attention length of a decode step is a multiple of this."""
BAND_STEP = 24
"""Bands whose lengths differ by less attend together: another call costs more than it saves."""
GPU_LENGTH_QUANTUM = 128
"""As ``LENGTH_QUANTUM``, on a GPU, where every length is a captured graph."""


class Decoder:
    """A transformer with its own weight buffers and a slot cache."""

    def __init__(self, config: ModelConfig, options: EngineOptions) -> None:
        self._options = options
        self._device = torch.device(options.device)
        with torch.device("meta"):
            model = Transformer(config)
        model = model.to(getattr(torch, options.dtype)).to_empty(device=self._device)
        self._model = model.requires_grad_(False).eval()
        fused = self._device.type == "cpu" and options.dtype == "float32"
        self._cache = KVCache(
            config,
            slots=options.slots,
            max_tokens=options.max_tokens,
            device=self._device,
            dtype=getattr(torch, options.dtype),
        )
        self._on_gpu = self._device.type == "cuda"
        self._forward = self._forward_of(fused)
        self._sampling_of: tuple[SlotTable, int, int] | None = None
        self._sampling: RowSampling | None = None

    def _forward_of(self, fused: bool) -> CachedForward:
        if fused:
            placeless = self._options.deterministic
            return FusedForward(self._model, self._cache, placeless=placeless)
        return (GraphedForward if self._on_gpu else ModelForward)(self._model, self._cache)

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, their rearranged copies and the cache."""
        copies = self._forward.held
        held = (*self._model.parameters(), *copies, self._cache.keys, self._cache.values)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Those held, not copied."""
        return weights_of(self._model)

    def load_weights(self, weights: Mapping[str, Any]) -> str:
        """Copy the weights in, all or none, and return the digest of what is held.

        Raises:
            ValueError: Names, shapes or dtypes differ; nothing was copied.
        """
        held = weights_of(self._model)
        incoming = {name: torch.as_tensor(weights[name]) for name in weights}
        if incoming.keys() != held.keys():
            missing = sorted(held.keys() - incoming.keys())
            extra = sorted(incoming.keys() - held.keys())
            raise ValueError(f"weights do not fit the model: missing {missing}, extra {extra}")
        for name, tensor in held.items():
            given = incoming[name]
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise ValueError(
                    f"weight {name} is {tuple(given.shape)} {given.dtype}, "
                    f"the model holds {tuple(tensor.shape)} {tensor.dtype}"
                )
        digest = ArraysDigest()
        for name, tensor in sorted(held.items()):
            tensor.copy_(incoming[name])
            # Now it is in the caches of the processor.
            digest.add(name, as_array(tensor))
        self._forward.refresh()
        self.clear()
        return digest.hex()

    def clear(self) -> None:
        """Forget all cached keys and values."""
        self._cache.clear()

    @torch.inference_mode()
    def prefill(self, entering: Sequence[tuple[int, Array]]) -> None:
        """Fill slots with all but the last context token (that one is fed by the next step).

        Equal contexts (the sessions of a group) are computed once.

        Args:
            entering: (slot, int64 context) of each request.
        """
        buckets: dict[int, dict[bytes, tuple[Array, list[int]]]] = {}
        for slot, context in entering:
            if len(context) > 1:
                bucket = buckets.setdefault(self._padded(len(context) - 1), {})
                bucket.setdefault(context.tobytes(), (context[:-1], []))[1].append(slot)
        for padded, bucket in buckets.items():
            prompts = list(bucket.values())
            rows = PREFILL_ROWS
            if not self._options.deterministic:
                rows = max(1, min(len(prompts), PREFILL_MAX_TOKENS // padded))
            for start in range(0, len(prompts), rows):
                self._prefill(prompts[start : start + rows], padded, rows)

    def _padded(self, tokens: int) -> int:
        power = 1 << (tokens - 1).bit_length()
        return min(max(power, PREFILL_TOKENS), self._options.max_tokens)

    def _prefill(self, prompts: Sequence[tuple[Array, list[int]]], padded: int, rows: int) -> None:
        if not self._options.deterministic:
            padded = max(len(prompt) for prompt, _ in prompts)
        tokens_BT = np.zeros((rows, padded), np.int64)
        sources: list[int] = []
        targets: list[int] = []
        for row, (prompt, slots) in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = prompt
            targets += slots
            sources += [row] * len(slots)
        self._cache.note_use(max(targets) + 1, padded)
        self._forward.prefill(self._to(tokens_BT), self._to(targets), self._to(sources))

    def compact(self, table: SlotTable) -> None:
        """Move live rows to the front, so that a step computes no free ones."""
        targets, sources = table.compaction()
        if targets:
            table.move(targets, sources)
            # The next step writes keys and values at the positions themselves.
            self._cache.move(targets, sources, int(table.position[targets].max()))

    @torch.inference_mode()
    def step(self, table: SlotTable) -> tuple[Array, Array]:
        """Feed each row's current token and draw the next one.

        Returns:
            int64 (N,) tokens and float32 (N,) log-probabilities. N is every slot when
            deterministic, else the live rows, which must lie in front.

        Raises:
            TrainingError: The model's output is not finite.
        """
        bands = self._bands(table)
        rows = bands[-1][0]
        # On a GPU free rows decode as well, at positions of their own.
        longest = max([length for _, length in bands])
        self._cache.note_use(rows, self._options.max_tokens if self._on_gpu else longest)
        logits_NV = self._forward.step(
            self._to(table.token[:rows]), self._to(table.position[:rows]), bands
        )
        tokens_N, logprobs_N = sample(
            logits_NV, self._to(table.next_uniforms(rows)), self._row_sampling(table, rows)
        )
        tokens, logprobs = tokens_N.cpu().numpy(), logprobs_N.cpu().numpy()
        if not np.isfinite(logprobs[table.live[:rows]]).all():
            raise TrainingError(
                "the model's log-probabilities are not finite",
                where="rollout engine",
                rule="weights that generate must give finite outputs",
                way_out="load finite weights; see the learner's last steps for where they broke",
            )
        return tokens, logprobs

    def _bands(self, table: SlotTable) -> Bands:
        """Rows and attention lengths of the next step."""
        longest = self._options.max_tokens
        if self._options.deterministic:
            return ((len(table.live), longest),)
        rows = table.count
        if self._on_gpu:
            # Few graphs serve all numbers of rows and lengths; free rows decode harmlessly.
            length = int(table.position[:rows].max()) // GPU_LENGTH_QUANTUM + 1
            rows = min(1 << (rows - 1).bit_length(), self._options.slots)
            return ((rows, min(length * GPU_LENGTH_QUANTUM, longest)),)
        starts = np.arange(0, rows, BAND_ROWS)
        furthest = np.maximum.reduceat(table.position[:rows], starts)
        lengths = np.minimum((furthest // LENGTH_QUANTUM + 1) * LENGTH_QUANTUM, longest)
        bands: list[tuple[int, int]] = []
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            end = min(start + BAND_ROWS, rows)
            if bands and abs(length - bands[-1][1]) < BAND_STEP:
                bands[-1] = (end, max(length, bands[-1][1]))
            else:
                bands.append((end, length))
        return tuple(bands)

    def _row_sampling(self, table: SlotTable, rows: int) -> RowSampling:
        wanted = (table, table.changes, rows)
        if self._sampling is None or self._sampling_of != wanted:
            self._sampling_of, self._sampling = wanted, self._read_sampling(table, rows)
        return self._sampling

    def _read_sampling(self, table: SlotTable, rows: int) -> RowSampling:
        truncated = (table.top_k[:rows] < table.vocab_size) | (table.top_p[:rows] < 1)
        tempered = bool((table.temperature[:rows] != 1).any())
        return RowSampling(
            temperature_N=self._to(table.temperature[:rows].copy()) if tempered else None,
            top_k_N=self._to(table.top_k[:rows].copy()),
            top_p_N=self._to(table.top_p[:rows].copy()),
            greedy_N=self._to(table.greedy[:rows].copy()),
            truncated_N=self._to(truncated) if truncated.any() else None,
            some_greedy=bool(table.greedy[:rows].any()),
        )

    def _to(self, values: Array | list[int]) -> Tensor:
        return torch.as_tensor(values).to(self._device)
