"""``perdure status`` of a run that is being trained, and of one whose process is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perdure.cli import main as cli
from perdure.config import load_config
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

RECIPE = Path(__file__).parents[1] / "drills" / "drill_recipe.yaml"


def status(run: Path, *options: str) -> str:
    result = CliRunner().invoke(cli.app, ["status", str(run), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_live_run_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    # Every turn of the event loop: the run is over in a second.
    monkeypatch.setattr("perdure.trainers.live_facts.EVERY_S", 0.0)
    seen: list[dict[str, Any]] = []
    lines: list[str] = []

    def display(name: str, fields: dict[str, object]) -> None:
        if name == "published" and fields["version"] == 3:
            seen.append(json.loads(status(run, "--json")))
            lines.append(status(run))

    config = load_config(RunConfig, RECIPE, ["mode=separate_async", "learner.supervised.steps=0"])
    launch.train(config, run, display=display)
    live = seen[0]
    assert live["live"] is True
    assert (live["version"], live["total_steps"]) == (3, 6)
    assert live["version_step"] == live["global_step"]
    assert live["process"]["incarnation"] == 1
    assert live["process"]["pid"] == live["holder"]["pid"]
    engine = live["process"]["engines"][0]
    assert (engine["state"], engine["version"]) == ("serving", 3)
    assert live["ages_s"].keys() >= {"step", "checkpoint_committed"}
    assert "a live process holds it (process " in lines[0]
    assert f"engine {engine['name']}: serving" in lines[0]
    step = live["global_step"]
    assert f"published: version 3, the weights of step {step}, the newest there is" in lines[0]
    over = json.loads(status(run, "--json"))
    assert (over["live"], over["why"], over["process"]["ended"]) == (False, [], True)
    assert over["groups"] == {"trained": 24}
    assert (over["frontier"], over["evictions"]) == (24, {})
    rows = [json.loads(line) for line in (run / "metrics/steps.jsonl").read_text().splitlines()]
    assert [row["metrics"]["frontier"] for row in rows] == [8, 12, 16, 20, 24, 24]
    assert all(row["timings_s"]["wait"] >= 0 for row in rows)


def test_a_run_without_a_process_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def display(name: str, fields: dict[str, object]) -> None:
        if name == "published" and fields["version"] == 3:
            raise RuntimeError("the machine is gone")

    config = load_config(RunConfig, RECIPE, ["learner.supervised.steps=0"])
    with pytest.raises(RuntimeError):
        launch.train(config, run, display=display)
    (run / "live.json").unlink()
    text = status(run)
    assert "no process holds it" in text
    assert "why: no process works on it; go on with `perdure resume`" in text
    assert "process: has said nothing of itself" in text
