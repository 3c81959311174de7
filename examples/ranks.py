"""Training on several ranks that survives ``kill -9`` of any of them, and goes on with any number.

    torchrun --nproc-per-node 4 examples/ranks.py runs/ranks
    torchrun --nproc-per-node 2 examples/ranks.py runs/ranks       # after a kill, on fewer ranks

Parameters and optimizer state are spread over the ranks (``fully_shard``); each rank stores its
part, and one commit makes the parts a checkpoint.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from perdure import CheckpointEngine, every

FEATURES, ROWS = 6, 24


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a step's batch; all ranks together have the same ones, however many."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    targets = inputs.square().sum(1, keepdim=True)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[mine], targets[mine]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 15), nn.Tanh(), nn.Linear(15, 1))
    fully_shard(model)
    return model


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    inputs, targets = rows(step)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(run_dir: str, total: int) -> float:
    """Train up to the last step; the loss over all rows of the batch after it."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    engine = CheckpointEngine(run_dir, save=every(steps=10), process_group=dist.group.WORLD)
    engine.register(model=model, optimizer=optimizer, rng="all")
    for step in engine.steps(total):
        learn(model, optimizer, step)

    with torch.no_grad():
        inputs, targets = rows(total + 1)
        loss = nn.functional.mse_loss(model(inputs), targets)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    loss = train(arguments.run_dir, arguments.steps)
    if dist.get_rank() == 0:
        logging.getLogger("ranks").info("done: loss %.4f", loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
