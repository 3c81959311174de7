"""``perdure status`` of a run that is being trained, and of one whose process is gone."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from perdure import CheckpointEngine, every
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
    assert (over["frontier"], over["evictions"], over["complete"]) == (24, {}, True)
    text = status(run)
    assert text.startswith(f"{run}: finished; incarnation 1\nglobal step 6 of 6 done, ")
    assert "taken since" not in text
    assert "process: ended " in text
    assert "engine" not in text
    rows = [json.loads(line) for line in (run / "metrics/steps.jsonl").read_text().splitlines()]
    assert [row["metrics"]["frontier"] for row in rows] == [8, 12, 16, 20, 24, 24]
    assert all(row["timings_s"]["wait"] >= 0 for row in rows)


def published(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("published: ")]
    return line


def test_weights_that_did_not_change_are_not_called_behind(tmp_path: Path) -> None:
    """Steps so small that no bit of a weight turns: nothing is to be published after the first."""
    run, lines = tmp_path / "run", list[str]()

    def display(name: str, fields: dict[str, object]) -> None:
        if name == "evaluated":
            lines.append(published(status(run)))

    still = ["learner.lr=1e-30", "learner.supervised.steps=0", "validation.every_steps=1"]
    launch.train(load_config(RunConfig, RECIPE, still), run, display=display)
    newest, *unchanged = [line.partition(", the weights of step 0")[2] for line in lines]
    assert newest.startswith(", the newest there is, ")
    assert unchanged[0].startswith(", which have not changed in the 1 step since, ")
    assert unchanged[1].startswith(", which have not changed in the 2 steps since, ")
    over = published(status(run))
    assert "version 1, the weights of step 0, which have not changed in the 6 steps since" in over
    assert "behind" not in "".join([*lines, over])


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
    assert f"why: no process works on it; go on with `perdure resume {run}`" in text
    assert "process: has said nothing of itself" in text


def test_a_killed_process_is_not_told_of_as_if_it_lived(tmp_path: Path) -> None:
    run = tmp_path / "run"
    last_word: list[bytes] = []

    def display(name: str, fields: dict[str, object]) -> None:
        if name == "published" and fields["version"] == 3:
            last_word.append((run / "live.json").read_bytes())
            raise RuntimeError("the machine is gone")

    config = load_config(RunConfig, RECIPE, ["learner.supervised.steps=0"])
    with pytest.raises(RuntimeError):
        launch.train(config, run, display=display)
    (run / "live.json").write_bytes(last_word[0])
    text = status(run)
    assert "process: gone; its last word " in text
    assert "serving" not in text
    assert "in flight" not in text


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_healthy_run_has_no_reason_to_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr("perdure.trainers.live_facts.EVERY_S", 0.0)
    seen: dict[str, dict[str, Any]] = {}
    lines: list[str] = []

    def display(name: str, fields: dict[str, object]) -> None:
        if name in ("warm_start_step", "published", "update", "step", "evaluated"):
            seen[name] = json.loads(status(run, "--json"))
        if name == "warm_start_step" and fields["step"] == 3:
            lines.append(status(run))

    launch.train(load_config(RunConfig, RECIPE, [f"mode={mode}"]), run, display=display)
    assert seen.keys() >= {"warm_start_step", "published", "step"}
    assert [why for one in seen.values() for why in one["why"] if "engine" in why] == []
    assert "\nwarm start: step 3 of 12 done, " in lines[0]
    assert "; no global step of 6 yet\n" in lines[0]
    assert "\ncheckpoint: none yet\n" in lines[0]
    assert "why:" not in lines[0]


def loop(run: Path, *, leave_at: int = 0, look_at: int = 0) -> list[str]:
    """A script of 6 steps that saves every second one; what status says in the middle."""
    said: list[str] = []
    engine = CheckpointEngine(run, save=every(steps=2))
    engine.register(weights=np.zeros(4))
    for step in engine.steps(6):
        if step == look_at:
            said.append(status(run))
        if step == leave_at:
            break
    return said


def test_the_run_of_a_script_is_told_of_by_its_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (early,) = loop(run, look_at=1, leave_at=1)
    assert "\nstep 0 saved; steps since are known to the script only\n" in early
    assert "why:" not in early
    loop(run, leave_at=4)
    left = status(run)
    assert "no process holds it" in left
    assert "\nstep 2 of 6 saved; steps since are known to the script only\n" in left
    assert "\ncheckpoint: step-00000002-2, " in left
    assert left.endswith("why: no process works on it; start the script again\n")
    assert "a crash or a loss of power costs the steps since the last save, the loss of" in left
    assert "process: " not in left
    assert "unknown time" not in left
    assert json.loads(status(run, "--json"))["global_step"] == 2
    (live,) = loop(run, look_at=5)
    assert "a live process holds it" in live
    assert "why:" not in live
    over = status(run)
    assert over.startswith(f"{run}: finished; incarnation 3\nstep 6 of 6 saved\n")
    assert "why:" not in over


def test_a_damaged_checkpoint_of_a_script_is_called_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    loop(run)
    newest = max((run / "checkpoints").glob("step-*"))
    (newest / "manifest.json").write_bytes(b"{}")
    text = status(run)
    assert f"checkpoint: {newest.name}, which is damaged (" in text
    assert "step 6 saved;" in text


def test_a_run_on_a_disk_that_only_reads_can_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, opened = tmp_path / "run", os.open
    loop(run)
    refused: list[str] = []

    def only_reads(path: str, flags: int, *rest: int, **how: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refused.append(str(path))
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, *rest, **how)

    monkeypatch.setattr(os, "open", only_reads)
    assert status(run).startswith(f"{run}: finished; ")
    assert refused == [str(run / "lock")]
    (run / "lock").unlink()
    assert status(run).startswith(f"{run}: finished; ")


def test_only_a_run_of_a_like_name_is_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop(tmp_path / "runs" / "sep")
    monkeypatch.chdir(tmp_path)
    for name, proposed in (("sep2", True), ("nope", False), ("mine", False)):
        result = CliRunner().invoke(cli.app, ["status", f"runs/{name}"])
        assert result.exit_code == 6
        assert ("did you mean 'runs/sep'?" in result.output) is proposed
        assert "one that was just started is here in a moment" in result.output
