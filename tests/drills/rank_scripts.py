"""Scripts of several ranks for the drills: one of plain arrays, one of ``examples/ranks.py``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from loop_script import load_example_of
from rank_cases import SHAPES, SpreadArrays, wholes

from perdure import CheckpointEngine, every
from perdure.checkpoint.shares import RankPlace
from perdure.checkpoint.team import Team
from perdure.checkpoint.torch_channel import StoreChannel
from perdure.core.clock import SystemClock
from perdure.core.faults import FaultHook

WAIT_S = 20.0
ENDLESS = 1_000_000
PAUSE_S = 0.002


def arrays(
    run: Path, faults: FaultHook, *, rank: int, size: int, store: str, wait_s: float
) -> None:
    """Count up, in arrays that are spread over the ranks; it does not end by itself."""
    place = RankPlace(rank, size)
    channel = StoreChannel(dist.FileStore(store, size), clock=SystemClock())
    team = Team(place, channel, wait_s)
    model, counters = SpreadArrays(SHAPES, place), {"steps": 0}
    model.fill(wholes(0))
    engine = CheckpointEngine(
        run, save=every(steps=3, budget=1.0), keep=2, faults=faults, process_group=team
    )
    engine.register(model=model, counters=counters)
    generator = random.Random(rank)
    engine.register(generator=generator)
    for step in engine.steps(ENDLESS, change_total=True):
        if step == engine.step + 1:
            assert model.holds(wholes(step - 1)), f"rank {rank} does not hold step {step - 1}"
            assert counters["steps"] == step - 1
        team.together(lambda: None)
        for part in model.parts.values():
            part += 1
        counters["steps"] = step
        time.sleep(PAUSE_S * generator.random())


def spread_model(
    run: Path, faults: FaultHook, *, rank: int, size: int, store: str, steps: int, idle: bool
) -> None:
    """The example on gloo up to a step; ``idle``: with a body that changes nothing."""
    example = load_example_of("ranks.py")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    model = example.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine = CheckpointEngine(
        run,
        save=every(steps=5, budget=1.0),
        faults=faults,
        process_group=dist.group.WORLD,
        rank_timeout_s=WAIT_S,
    )
    engine.register(model=model, optimizer=optimizer, rng="all")
    body: Callable[..., Any] = (lambda *_: None) if idle else example.learn
    for step in engine.steps(steps, change_total=True):
        body(model, optimizer, step)
    dist.destroy_process_group()
