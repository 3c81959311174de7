"""What one decoding step of the embedded engine spends its time on, as text.

    python benchmarks/engine_profile.py [--model 1M] [--rows 64] [--top 12]

Every operator counts once with what it calls; its share is its own CPU time. The profiler itself
costs about a microsecond per call, so few rows look more expensive than they are.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from engine import MODELS, NEW, PROMPT
from torch.profiler import ProfilerActivity, profile

from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import Transformer, init_weights, weights_of
from perdure.rollout import EngineOptions
from perdure.rollout.decoder import Decoder
from perdure.rollout.slots import LiveRequest, SlotTable

STEPS = 16


def ready(name: str, rows: int) -> tuple[Decoder, SlotTable]:
    """A decoder and a table of requests that stand in the middle of their answers."""
    model = Transformer(MODELS[name])
    init_weights(model, 1)
    options = EngineOptions(slots=64, max_tokens=PROMPT + NEW)
    decoder = Decoder(model.config, options)
    decoder.load_weights(weights_of(model))
    table = SlotTable(slots=64, max_tokens=options.max_tokens, vocab_size=model.config.vocab_size)
    prompt = tuple(range(PROMPT + NEW // 2 - STEPS // 2))
    for row in range(rows):
        request = GenerationRequest(
            f"r{row}", prompt, SamplingParams(max_new_tokens=2 * STEPS), (1, row)
        )
        table.occupy(row, LiveRequest(request, np.array(prompt, np.int64), 2 * STEPS))
    decoder.prefill([(row, np.array(prompt, np.int64)) for row in range(rows)])
    return decoder, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1M", choices=MODELS)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--top", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    decoder, table = ready(arguments.model, arguments.rows)
    for steps in (STEPS // 2, STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(steps):
                table.record(*decoder.step(table), chunk_tokens=16)
    events = profiled.key_averages()
    whole_us = sum(event.self_cpu_time_total for event in events)
    calls = sum(event.count for event in events)
    print(
        f"{arguments.model}, {arguments.rows} rows: {whole_us / STEPS:,.0f} us a step in operators"
    )
    print(f"{calls / STEPS:.0f} operator calls a step, nested ones included\n")
    print(f"{'operator':34} {'share':>6} {'calls':>6} {'us each':>8}")
    events = sorted(events, key=lambda event: -event.self_cpu_time_total)
    for event in events[: arguments.top]:
        each_us = event.self_cpu_time_total / event.count
        share = event.self_cpu_time_total / whole_us
        print(f"{event.key[:34]:34} {share:6.1%} {event.count / STEPS:6.0f} {each_us:8.1f}")


if __name__ == "__main__":
    main()
