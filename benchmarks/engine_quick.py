"""Tokens per second of the embedded engine on many short requests, asyncio included.

Run: ``OMP_NUM_THREADS=1 python benchmarks/engine_quick.py``
"""

from __future__ import annotations

import asyncio
import time

import torch

from perdure.core.ids import PolicyVersion
from perdure.core.keyed_random import generator
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import ModelConfig, Transformer, init_weights, weights_of
from perdure.rollout import EmbeddedEngine, EngineOptions

REQUESTS, GROUP, STOP = 512, 8, 3
MODEL = ModelConfig(
    vocab_size=16,
    hidden_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate_size=352,
    max_positions=32,
)


def requests(seed: int) -> list[GenerationRequest]:
    """512 requests in groups of 8: prompts of 5 to 16 tokens, answers of 4 to 14."""
    found: list[GenerationRequest] = []
    for index in range(REQUESTS):
        draw = generator(seed, "bench", index // GROUP)
        prompt = tuple(draw.integers(4, MODEL.vocab_size, int(draw.integers(5, 17))).tolist())
        sampling = SamplingParams(
            max_new_tokens=int(draw.integers(4, 15)), stop_token_ids=(STOP, 99)
        )
        found.append(GenerationRequest(f"r{index}", prompt, sampling, (seed, index)))
    return found


async def answer(engine: EmbeddedEngine, request: GenerationRequest) -> int:
    return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])


async def measure(options: EngineOptions, repeats: int = 5) -> None:
    model = Transformer(MODEL)
    init_weights(model, 1)
    engine = EmbeddedEngine(MODEL, options)
    await engine.load_weights(PolicyVersion(1), weights_of(model))
    best = 0.0
    for repeat in range(repeats):
        batch = requests(repeat)
        start_s = time.process_time()
        counts = await asyncio.gather(*(answer(engine, request) for request in batch))
        best = max(best, sum(counts) / (time.process_time() - start_s))
    await engine.close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"slots {options.slots:4d} deterministic {options.deterministic!s:5} "
        f"{parameters / 1e6:.2f} M parameters: {best:,.0f} tokens per CPU-second"
    )


def main() -> None:
    torch.set_num_threads(1)
    for slots in (64, 128, 256):
        for deterministic in (False, True):
            options = EngineOptions(slots=slots, max_tokens=32, deterministic=deterministic)
            asyncio.run(measure(options))


if __name__ == "__main__":
    main()
