"""A small DQN that survives ``kill -9``: everything but five lines is an ordinary script.

    python examples/dqn.py runs/dqn          # kill it at any moment, then start it again
    python examples/dqn.py runs/dqn --steps 3000

The environment is a corridor: walk right to the end for a reward, with a wind that blows back.
"""

from __future__ import annotations

import argparse
import logging
import random
from typing import Any, Unpack

import numpy as np
import torch

from perdure import CheckpointEngine, every
from perdure.standalone import EngineOptions, SavePolicy

CELLS = 8
CAPACITY = 512
BATCH = 32


def train(
    run_dir: str, total: int, *, save: SavePolicy | None = None, **options: Unpack[EngineOptions]
) -> dict[str, Any]:
    """Train for ``total`` steps of the environment; returns the counters."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    online, target = make_network(), make_network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
    replay = make_replay()
    counters = {"cell": 0, "episodes": 0, "steps_in_episode": 0, "best_episode": 1_000_000}

    engine = CheckpointEngine(run_dir, save=save or every(steps=500, minutes=5), **options)
    engine.register(online=online, target=target, optimizer=optimizer, schedule=schedule)
    engine.register(replay=replay, counters=counters, rng="all")
    for step in engine.steps(total):
        act_and_store(online, replay, counters, epsilon=max(0.05, 1 - step / 500))
        if replay["total"] >= BATCH:
            learn(online, target, optimizer, replay)
            schedule.step()
        if step % 50 == 0:
            target.load_state_dict(online.state_dict())
    return counters


def make_network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(CELLS, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2))


def make_replay() -> dict[str, Any]:
    """A ring of transitions in arrays; ``total`` counts everything that was ever stored."""
    return {
        "cell": np.zeros(CAPACITY, np.int64),
        "action": np.zeros(CAPACITY, np.int64),
        "reward": np.zeros(CAPACITY, np.float32),
        "next_cell": np.zeros(CAPACITY, np.int64),
        "done": np.zeros(CAPACITY, np.bool_),
        "total": 0,
    }


def act_and_store(
    online: torch.nn.Module, replay: dict[str, Any], counters: dict[str, int], *, epsilon: float
) -> None:
    """One step in the corridor: walk, be blown back now and then, remember."""
    cell = counters["cell"]
    if random.random() < epsilon:
        action = random.randrange(2)
    else:
        action = int(online(one_hot(np.array([cell]))).argmax())
    blown = np.random.random() < 0.05
    moved = cell - 1 if blown or action == 0 else cell + 1
    next_cell = min(max(moved, 0), CELLS - 1)
    done = next_cell == CELLS - 1
    slot = replay["total"] % CAPACITY
    row = (cell, action, 1.0 if done else -0.01, next_cell, done)
    for name, value in zip(("cell", "action", "reward", "next_cell", "done"), row, strict=True):
        replay[name][slot] = value
    replay["total"] += 1
    counters["steps_in_episode"] += 1
    counters["cell"] = 0 if done else next_cell
    if done:
        counters["episodes"] += 1
        counters["best_episode"] = min(counters["best_episode"], counters["steps_in_episode"])
        counters["steps_in_episode"] = 0


def learn(
    online: torch.nn.Module,
    target: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    replay: dict[str, Any],
) -> None:
    """One step of Q-learning on a random batch."""
    rows = np.random.randint(0, min(replay["total"], CAPACITY), size=BATCH)
    reward = torch.as_tensor(replay["reward"][rows])
    alive = torch.as_tensor(~replay["done"][rows]).float()
    with torch.no_grad():
        value = target(one_hot(replay["next_cell"][rows])).max(dim=1).values
    chosen = online(one_hot(replay["cell"][rows])).gather(
        1, torch.as_tensor(replay["action"][rows])[:, None]
    )[:, 0]
    loss = torch.nn.functional.smooth_l1_loss(chosen, reward + 0.95 * alive * value)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def one_hot(cells: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.as_tensor(cells), CELLS).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("dqn").info("done: %s", train(arguments.run_dir, arguments.steps))


if __name__ == "__main__":
    main()
