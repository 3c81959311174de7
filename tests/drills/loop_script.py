"""The script of the drills: the parts of ``examples/dqn.py`` and a ring, slowed down.

A save takes as long as many of its steps, so a kill meets every stage of one.
"""

from __future__ import annotations

import importlib.util
import random
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from perdure import CheckpointEngine, every
from perdure.checkpoint import ReplayRing
from perdure.core.faults import FaultHook

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 60
PAUSE_S = 0.004


def load_example_of(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(run_dir: Path, faults: FaultHook, *, take_over: bool = False) -> None:
    """Start or go on, up to the last step."""
    dqn = load_example_of("dqn.py")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    online, target = dqn.make_network(), dqn.make_network()
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    arrays = dqn.make_replay()
    ring = ReplayRing(200, {"draw": ("f8", ())})
    counters: dict[str, Any] = {"cell": 0, "episodes": 0, "steps_in_episode": 0}
    counters["best_episode"] = 1_000_000
    generator = np.random.default_rng(1)

    engine = CheckpointEngine(
        run_dir, save=every(steps=3, budget=1.0), keep=2, faults=faults, take_over=take_over
    )
    engine.register(agent={"online": online, "target": target, "optimizer": optimizer})
    engine.register(schedule=schedule, arrays=arrays, ring=ring, counters=counters)
    engine.register(generator=generator, rng="all")
    for step in engine.steps(STEPS):
        for _ in range(4):
            dqn.act_and_store(online, arrays, counters, epsilon=1 - step / STEPS)
        dqn.learn(online, target, optimizer, arrays)
        schedule.step()
        ring.append({"draw": generator.random(7)})
        time.sleep(PAUSE_S)
