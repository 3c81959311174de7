"""Tokens per second of the embedded engine on a GPU beside ``transformers`` and the memory limit.

    python benchmarks/gpu_engine.py [--json PATH]       # a CUDA device
    python benchmarks/gpu_engine.py --tiny              # the script on a CPU; no figures

bfloat16, random weights, a Qwen2-shaped model of 0.5 B parameters, batches of 64 and 256, prompts
of 32 tokens and 128 new ones, log-probabilities on. The engine's cache is preallocated and its
decoding steps are captured CUDA graphs. The limit is what reading the weights once and the cache of
every row takes per step, at the bandwidth that copying device memory reaches in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from engine_contenders import quiet_peers, version_of

from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import ModelConfig, Transformer, weights_of
from perdure.models.huggingface import config_to_huggingface
from perdure.rollout import EmbeddedEngine, EngineOptions

HALF_BILLION = ModelConfig(
    vocab_size=151_936,
    hidden_size=896,
    layers=24,
    heads=14,
    kv_heads=2,
    intermediate_size=4864,
    rope_theta=1e6,
    qkv_bias=True,
    max_positions=256,
)
TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate_size=48,
    qkv_bias=True,
    max_positions=256,
)
PROMPT, NEW, ROUNDS = 32, 128, 3
COPIED_BYTES = 1 << 30


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def random_model(config: ModelConfig, device: str) -> Transformer:
    """Normal weights of standard deviation 0.02, norms 1."""
    with torch.device("meta"):
        model = Transformer(config)
    model = model.bfloat16().to_empty(device=device).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.02)
        if name.endswith("norm.weight"):
            parameter.fill_(1)
    return model


def bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(COPIED_BYTES if device == "cuda" else 1 << 24, dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        synchronize(device)
        start_s = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = max(best, 2 * source.numel() / (time.perf_counter() - start_s))
    return best


def memory_limit(model: Transformer, rows: int, bytes_per_s: float) -> float:
    """Tokens a second if a step only read the weights and, half-way, the rows' keys and values."""
    config = model.config
    weights = sum(tensor.nbytes for tensor in weights_of(model).values())
    per_token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    cached = rows * (PROMPT + NEW / 2) * per_token
    return rows * bytes_per_s / (weights + cached)


async def best_rate(run: Callable[[int], Awaitable[int]], device: str) -> float:
    """Best tokens a second; the first run warms up and captures graphs."""
    best = 0.0
    for turn in range(ROUNDS + 1):
        synchronize(device)
        start_s = time.perf_counter()
        tokens = await run(turn)
        synchronize(device)
        if turn:
            best = max(best, tokens / (time.perf_counter() - start_s))
    return best


async def perdure_rate(model: Transformer, rows: int, device: str) -> float:
    options = EngineOptions(slots=rows, max_tokens=PROMPT + NEW, dtype="bfloat16", device=device)
    engine = EmbeddedEngine(model.config, options)
    await engine.load_weights(PolicyVersion(1), weights_of(model))
    prompts = torch.randint(0, model.config.vocab_size, (rows, PROMPT)).tolist()

    async def answer(turn: int, row: int) -> int:
        sampling = SamplingParams(max_new_tokens=NEW)
        request = GenerationRequest(f"r{row}", tuple(prompts[row]), sampling, (turn, row))
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    async def run(turn: int) -> int:
        return sum(await asyncio.gather(*(answer(turn, row) for row in range(rows))))

    rate = await best_rate(run, device)
    await engine.close()
    return rate


async def transformers_rate(model: Transformer, rows: int, device: str) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = config_to_huggingface(model.config, dtype="bfloat16")
    peer = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**shape), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    peer = peer.to(device).eval()
    prompts_BT = torch.randint(0, model.config.vocab_size, (rows, PROMPT), device=device)

    @torch.inference_mode()
    async def run(_turn: int) -> int:
        output = peer.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new_BT = output.sequences[:, PROMPT:]
        for step, logits_BV in enumerate(output.logits):
            logits_BV.float().log_softmax(-1).gather(1, new_BT[:, step : step + 1])
        return new_BT.numel()

    return await best_rate(run, device)


async def measure(config: ModelConfig, batches: tuple[int, ...], device: str) -> dict[str, Any]:
    model = random_model(config, device)
    bytes_per_s = bandwidth(device)
    found: dict[str, Any] = {"bytes_per_s": bytes_per_s, "batches": {}}
    for rows in batches:
        figures = {
            "perdure": await perdure_rate(model, rows, device),
            "memory limit": memory_limit(model, rows, bytes_per_s),
        }
        if version_of("transformers"):
            figures["transformers generate"] = await transformers_rate(model, rows, device)
        found["batches"][rows] = figures
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gpu_engine.json"))
    arguments = parser.parse_args()
    quiet_peers()
    if not (arguments.tiny or torch.cuda.is_available()):
        raise SystemExit("no CUDA device: nothing was measured (--tiny runs the script on a CPU)")
    device = "cpu" if arguments.tiny else "cuda"
    config, batches = (TINY, (2, 3)) if arguments.tiny else (HALF_BILLION, (64, 256))
    found = asyncio.run(measure(config, batches, device))
    name = "cpu" if arguments.tiny else torch.cuda.get_device_name()
    print(f"{name}: copies {found['bytes_per_s'] / 1e9:,.0f} GB/s; tokens per second")
    for rows, figures in found["batches"].items():
        share = figures["perdure"] / figures["memory limit"]
        cells = ", ".join(f"{engine} {rate:,.0f}" for engine, rate in figures.items())
        print(f"batch {rows}: {cells}; perdure reaches {share:.0%} of the limit")
    if not version_of("transformers"):
        print("transformers: absent (not installed)")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"device": name, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
