"""Whole runs that are cut short again and again: nothing acknowledged is lost or trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from logged_batches import logged_records
from mischief import BEFALLS, CALL_INTERRUPTED, CALL_REPEATED, DIED_ASKED, EVERY_FAULT
from scenarios import Ending, Scenario, drawn
from sim_checks import check_audit
from sim_world import World

from perdure.core.agent_api import ToolKind
from perdure.core.experience_records import GroupSettled
from perdure.core.record_types import EvictionReason

MODES = ("sync", "colocate_async", "separate_async")
IN_CI = 67
IN_SOAK = 1700
"""For each mode."""
AUDITED = 7
"""Every so manieth run is audited from its files as well."""


def survive(mode: str, seeds: Iterable[int], folder: Path) -> Counter[str]:
    """Run the scenarios of the seeds; returns what befell them."""
    befell = Counter[str]()
    for seed in seeds:
        world = World(drawn(mode, seed))
        try:
            world.run()
            if seed % AUDITED == 0:
                check_audit(world.storage, folder / str(seed))
        except BaseException as error:
            error.add_note(f"World(drawn({mode!r}, {seed})).run() repeats it")
            raise
        befell += world.witness.seen
    return befell


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_runs_survive_what_befalls_them(mode: str, tmp_path: Path) -> None:
    befell = survive(mode, range(IN_CI), tmp_path)
    assert not BEFALLS[mode] - befell.keys(), "nothing of the kind has taken place"


@pytest.mark.parametrize("seed", [2, 3])
def test_an_engine_serves_new_weights_while_others_are_late(seed: int, tmp_path: Path) -> None:
    # Sessions of a version were in the log without its publication.
    limits: dict[str, object] = {"max_prompt_age": 3, "num_warmup_batches": 2}
    overrides = ("rollout.partial_tokens=1",)
    world = World(Scenario(seed, "separate_async", overrides, engines=3, late=0.3, limits=limits))
    world.run()
    check_audit(world.storage, tmp_path)


def test_prompts_that_came_while_no_engine_was_there_are_run_when_one_is() -> None:
    world = World(drawn("separate_async", 2017))
    world.run()
    assert any(name == "engine_replaced" for name, _ in world.events)


def test_nobody_waits_for_replacements_while_the_learner_has_the_devices() -> None:
    # Engines were asleep, and the second batch of a step waited for a new prompt.
    overrides = (
        "trainer.local_updates_per_step=2",
        "sampler.max_prompt_age=1",
        "sampler.age_policy=wait",
        "sampler.dynamic_filter=true",
    )
    for seed in range(40, 48):
        World(Scenario(seed, "colocate_async", overrides)).run()


def test_sessions_wait_for_a_replacement_of_an_engine_lost_in_the_switch_to_training() -> None:
    # The run ended: requests of the engine that was gone were taken for live ones.
    for seed in range(3):
        scenario = Scenario(seed, "colocate_async", deaths_asked=2, replaced=True)
        world = World(scenario)
        world.run()
        assert world.witness.seen[DIED_ASKED] == 2


def test_calls_are_cut_short_and_made_once() -> None:
    cut_short = 0
    endings = (Ending.POWER, Ending.KILL, Ending.STOP, Ending.POWER)
    for seed, kind in enumerate(ToolKind):
        scenario = Scenario(seed, "separate_async", endings=endings, tools=kind)
        world = World(scenario)
        world.run()
        assert len(world.outside.begun) > 50
        assert world.witness.seen[CALL_REPEATED], "nothing was lost on the way"
        cut_short += world.witness.seen[CALL_INTERRUPTED]
        assert any(name == "session_retried" for name, _ in world.events)
    assert cut_short > 10


def test_a_verifier_that_hangs_costs_its_group_and_no_more() -> None:
    for mode in MODES:
        world = World(Scenario(1, mode, hanging=0.05))
        state = world.run()
        failed = [r for r in logged_records(world.storage) if isinstance(r, GroupSettled)]
        hung = [r for r in failed if r.reason.endswith("verifier gave no verdict within 60 s")]
        assert hung
        assert state.table.evictions[EvictionReason.FAILED] == len(hung)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(17))
@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_runs_survive_what_befalls_them(mode: str, block: int, tmp_path: Path) -> None:
    count = IN_SOAK // 17
    first = IN_CI + block * count
    befell = survive(mode, range(first, first + count), tmp_path)
    assert not (BEFALLS[mode] | EVERY_FAULT) - befell.keys(), "nothing of the kind has taken place"
