"""Configurations that a trainer mode makes impossible (spec B5), and that all run in it (B6)."""

from __future__ import annotations

import pytest
from drill_tools import RECIPE

from perdure.config import load_config
from perdure.core.errors import ConfigError
from perdure.trainers.config import RunConfig

IMPOSSIBLE = {
    "no engine": (
        ["mode=separate_async", "rollout.engines=0"],
        "rollout.engines = 0; separate_async generates on engines of their own;"
        " way out; set rollout.engines=1 or more, or mode=colocate_async",
    ),
    "spillover in sync": (
        ["rollout.spillover=true"],
        "rollout.spillover = true; the learner's devices generate anyway in sync;"
        " way out; set rollout.spillover=false or mode=separate_async",
    ),
    "spillover in colocate_async": (
        ["mode=colocate_async", "rollout.spillover=true"],
        "rollout.spillover = true; the learner's devices generate anyway in colocate_async;"
        " way out; set rollout.spillover=false or mode=separate_async",
    ),
    "dropped before they are trained": (
        ["mode=separate_async", "sampler.num_warmup_batches=3", "sampler.max_prompt_age=3"],
        "sampler.max_prompt_age = 3; prompts that are submitted num_warmup_batches (3) ahead are"
        " trained when they are 4 steps old, so all of them would be dropped; way out; set"
        " sampler.max_prompt_age=4 or more, sampler.num_warmup_batches=2 or fewer, or"
        " sampler.age_policy=wait",
    ),
    "killed in health": (
        ["rollout.process.heartbeat_s=5"],
        "rollout.process.silence_timeout_s = 8; must be at least twice heartbeat_s (5), or healthy"
        " engines are killed; way out; set rollout.process.silence_timeout_s=10 or more",
    ),
    "updates that do not divide a step": (
        ["trainer.train_batch_size=6", "trainer.local_updates_per_step=4"],
        "trainer.train_batch_size = 6; must be a multiple of local_updates_per_step (4);"
        " way out; set trainer.train_batch_size=8",
    ),
}


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, RECIPE, overrides)
    return str(caught.value)


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_a_mode_makes_impossible_is_refused_with_the_way_out(case: str) -> None:
    overrides, sentence = IMPOSSIBLE[case]
    assert sentence in refusal(overrides).replace(": ", "; ")


def test_everything_impossible_is_refused_at_once() -> None:
    chosen = ["no engine", "dropped before they are trained", "killed in health"]
    overrides = [each for case in chosen for each in IMPOSSIBLE[case][0]]
    text = refusal([*overrides, "learner.mini_batches=3"]).replace(": ", "; ")
    for case in chosen:
        assert IMPOSSIBLE[case][1] in text
    assert "learner.mini_batches = 3; must divide the 8 trajectories" in text


def test_an_unknown_mode_is_refused_with_the_nearest() -> None:
    assert "separate_async" in refusal(["mode=seperate_async"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampler.num_warmup_batches=3", "sampler.max_prompt_age=1"],
        ["mode=colocate_async", "sampler.age_policy=wait", "sampler.max_prompt_age=1"],
        ["mode=colocate_async", "rollout.engines=0"],
        ["mode=separate_async", "sampler.num_warmup_batches=3", "sampler.max_prompt_age=4"],
        ["mode=separate_async", "rollout.engines=3", "rollout.spillover=true"],
    ],
)
def test_what_is_possible_is_not_refused(overrides: list[str]) -> None:
    load_config(RunConfig, RECIPE, overrides)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_one_key_changes_the_mode(mode: str) -> None:
    recipe = ["trainer.local_updates_per_step=2", "learner.mini_batches=2", "rollout.engines=2"]
    config = load_config(RunConfig, RECIPE, [*recipe, f"mode={mode}"])
    assert config.model_copy(update={"mode": "sync"}) == load_config(RunConfig, RECIPE, recipe)
