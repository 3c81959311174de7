"""Which checkpoints a trained run keeps, across restarts, and what the command line says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ckpt_cases import names, perdure, script
from drill_tools import RECIPE

from perdure import keep
from perdure.checkpoint import ReplayRing
from perdure.config import load_config
from perdure.core.errors import ConfigError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected

RULES = (
    "checkpoint.every_steps=1",
    "checkpoint.keep=1",
    "checkpoint.keep_every_steps=4",
    "checkpoint.keep_best_count=2",
    "validation.every_steps=1",
)


@pytest.mark.parametrize(
    ("metric", "mode", "file", "name"),
    [
        ("train/reward", "max", "steps.jsonl", "reward"),
        ("held_out/reward", "min", "evaluations.jsonl", "reward"),
    ],
)
def test_a_run_keeps_its_best_across_a_crash(
    tmp_path: Path, metric: str, mode: str, file: str, name: str
) -> None:
    run = tmp_path / "run"
    overrides = (*RULES, f"checkpoint.keep_best={metric}", f"checkpoint.keep_best_mode={mode}")
    config = load_config(RunConfig, RECIPE, overrides)
    plan = FaultPlan([FaultRule(FaultPoint.STEP_DONE, 4, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.train(config, run, injected=Injected(faults=plan))
    launch.resume(run)
    rows = [json.loads(line) for line in (run / "metrics" / file).read_text().splitlines()]
    sign = -1 if mode == "max" else 1
    ranked = sorted((sign * row["metrics"][name], row["global_step"]) for row in rows)
    best = {step for _, step in ranked[:2]}
    listed = json.loads(perdure("ckpt", "list", run, "--json")[1])["checkpoints"]
    why = {one["step"]: one["kept"] for one in listed}
    last = config.trainer.total_steps
    assert set(why) == best | {4, last}
    assert {step for step, kept in why.items() if any(metric in text for text in kept)} == best
    assert "every" in why[4]
    assert "last" in why[last]
    assert len(names(run)) == len(why)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("checkpoint.keep_best=reward",), "train/reward"),
        (("checkpoint.keep_best=held_out/reward", "validation.prompts=0"), "no validation"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(RunConfig, RECIPE, overrides)


def test_the_command_line_says_why_and_collects_by_the_rules(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script(run, steps=7, keep=keep(last=1, every=3))
    code, out, _ = perdure("ckpt", "list", run)
    assert code == 0
    words = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert "  every  " in words["step-00000003-1"]
    assert "  last  " in words["step-00000007-1"]
    assert perdure("ckpt", "gc", run)[1] == (
        "step-00000003-1          kept: every\n"
        "step-00000006-1          kept: every\n"
        "step-00000007-1          kept: last, verified\n"
        "nothing to collect\n"
    )
    assert perdure("ckpt", "gc", run, "--drop-archived")[0] == 0
    assert names(run) == ["step-00000007-1"]


def test_a_checkpoint_is_shown_with_the_segments_it_shares(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ring = ReplayRing(8, {"x": ("f4", ())})
    script(
        run,
        steps=2,
        each=lambda step: ring.append({"x": np.full(4, step, np.float32)}),
        replay=ring,
    )
    out = perdure("ckpt", "show", run)[1]
    shared = json.loads(perdure("ckpt", "show", run, "--json")[1])["segments"]["replay"]
    assert f"segments of replay: {len(shared)}, 8 rows" in out
    for one in shared:
        assert f"{one['path']} " in out
        assert one["xxh3_128"] in out
