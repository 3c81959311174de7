"""Whole runs that lose power again and again: nothing acknowledged is lost or trained twice."""

from __future__ import annotations

import pytest
from sim_world import Scenario, World

MODES = ("sync", "colocate_async", "separate_async")
IN_CI = 70
IN_SOAK = 1700
"""For each mode."""


def lives(mode: str, seed: int) -> World:
    """A scenario that is drawn from its seed."""
    updates = seed % 2 + 1
    overrides = [f"trainer.local_updates_per_step={updates}"]
    if mode != "sync":
        age, policy = seed % 3 + 1, ("drop", "wait")[seed // 3 % 2]
        overrides += [
            f"sampler.max_prompt_age={age}",
            f"sampler.age_policy={policy}",
            f"sampler.num_warmup_batches={seed % 4}",
            f"sampler.dynamic_filter={str(seed % 5 == 0).lower()}",
        ]
    separate = mode == "separate_async"
    world = World(
        Scenario(
            seed,
            mode,
            tuple(overrides),
            engines=3,
            crashes=seed % 5,
            deaths=seed % 3 if separate else 0,
            wrong_digests=seed % 2 if separate else 0,
        )
    )
    world.run()
    return world


@pytest.mark.parametrize("seed", range(IN_CI))
@pytest.mark.parametrize("mode", MODES)
def test_a_run_survives_every_loss_of_power(mode: str, seed: int) -> None:
    lives(mode, seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(17))
@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_runs_survive_every_loss_of_power(mode: str, block: int) -> None:
    count = IN_SOAK // 17
    for seed in range(IN_CI + block * count, IN_CI + (block + 1) * count):
        lives(mode, seed)
