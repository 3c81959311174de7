"""What earlier weights left in the cache of keys and values never shows, finite or not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import ModelConfig, Transformer, init_weights, weights_of
from perdure.rollout import EmbeddedEngine, EngineOptions
from perdure.rollout.decoder import Decoder
from perdure.rollout.kv_cache import KVCache

MODEL = ModelConfig(
    vocab_size=9, hidden_size=16, layers=2, heads=2, intermediate_size=24, max_positions=160
)
Answers = list[tuple[list[int], list[float]]]


def weights(dtype: str) -> Mapping[str, torch.Tensor]:
    model = Transformer(MODEL)
    init_weights(model, 1)
    with torch.no_grad():
        model.embed.weight.mul_(20)
    return {name: one.to(getattr(torch, dtype)) for name, one in weights_of(model).items()}


def options_of(dtype: str, *, deterministic: bool = False) -> EngineOptions:
    return EngineOptions.model_validate(
        {"slots": 40, "max_tokens": 160, "dtype": dtype, "deterministic": deterministic}
    )


async def generated(engine: EmbeddedEngine, seed: int, sessions: int) -> Answers:
    """Requests far apart in length, some of them aborted, some only let in when others end.

    The first are short: their rows are the first, and others go further than they do.
    """
    rng = np.random.default_rng(seed)

    async def one(number: int) -> tuple[list[int], list[float]]:
        length, budget = (rng.integers(1, 9), 60) if number < 20 else rng.integers(1, (125, 36))
        prompt = tuple(rng.integers(0, 9, length).tolist())
        sampling = SamplingParams(max_new_tokens=int(budget))
        request = GenerationRequest(f"{seed}.{number}", prompt, sampling, (seed, number))
        aborted = rng.random() < 0.3
        tokens: list[int] = []
        logprobs: list[float] = []
        async for chunk in engine.generate(request):
            tokens += chunk.token_ids.tolist()
            logprobs += chunk.logprobs.tolist()
            if aborted:
                await engine.abort([request.request_id])
        return tokens, logprobs

    return list(await asyncio.gather(*map(one, range(sessions))))


def break_leftovers(cache: KVCache) -> int:
    """Let all that was written be what broken weights leave; return how much that is."""
    written = 0
    for cached in (cache.keys, cache.values):
        written += int(cached.count_nonzero())
        cached[cached != 0] = torch.nan
    return written


def as_on_gpu(engine: EmbeddedEngine) -> None:
    """Let it decode free rows as well, as graphs of few sizes do."""
    assert engine._decoder is not None
    engine._decoder._on_gpu = True


@pytest.mark.parametrize(
    ("dtype", "deterministic", "gpu"),
    [
        ("float32", False, False),
        ("float32", True, False),
        ("bfloat16", False, False),
        ("bfloat16", True, False),
        ("bfloat16", False, True),
    ],
)
@pytest.mark.parametrize("sessions", [(60, 3), (3, 60), (25, 40)])
def test_new_weights_find_nothing_of_the_old_ones_in_the_cache(
    sessions: tuple[int, int], deterministic: bool, dtype: str, gpu: bool
) -> None:
    async def main() -> None:
        options = options_of(dtype, deterministic=deterministic)
        given = weights(dtype)
        used = EmbeddedEngine(MODEL, options)
        await used.load_weights(PolicyVersion(0), given)
        if gpu:
            as_on_gpu(used)
        for version in range(1, 4):
            await generated(used, version, sessions[version % 2])
            assert used._decoder is not None
            assert break_leftovers(used._decoder._cache) > 1000
            await used.load_weights(PolicyVersion(version), given)
            fresh = EmbeddedEngine(MODEL, options)
            await fresh.load_weights(PolicyVersion(version), given)
            if gpu:
                as_on_gpu(fresh)
            again = 10 + version
            expected = await generated(fresh, again, sessions[(version + 1) % 2])
            await fresh.close()
            assert await generated(used, again, sessions[(version + 1) % 2]) == expected
        await used.close()

    asyncio.run(main())


def test_new_weights_find_nothing_of_prompts_that_were_not_continued() -> None:
    decoder = Decoder(MODEL, options_of("float32"))
    decoder.load_weights(weights("float32"))
    decoder.prefill([(2, np.arange(1, 9))])
    assert break_leftovers(decoder._cache) > 100
    decoder.load_weights(weights("float32"))
    decoder.prefill([(1, np.arange(1, 3)), (3, np.arange(1, 4))])
    for cached in (decoder._cache.keys, decoder._cache.values.transpose(-1, -2)):
        assert cached[:, :4].isfinite().all()
