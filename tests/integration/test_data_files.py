"""Where a run finds its data: beside the recipe, from any directory, and after a move."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml
from drill_tools import RECIPE, assert_same_training
from typer.testing import CliRunner

from perdure.cli.main import app
from perdure.config import config_digest, load_config
from perdure.core.errors import ConfigError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.tasks.samples import min_max_jsonl
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that names a file beside itself."""
    folder = tmp_path / "recipes"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "min_max.jsonl").write_text(min_max_jsonl(seed=3, count=300))
    settings = yaml.safe_load(RECIPE.read_text())
    settings["task"] = {"name": "jsonl", "jsonl": {"path": "data/min_max.jsonl"}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def half_done(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was started beside the recipe and cut off in its fourth step."""
    monkeypatch.chdir(recipe.parent)
    run = tmp_path / "run"
    plan = FaultPlan([FaultRule(FaultPoint.LOCAL_UPDATE_DONE, 7, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.train(load_config(RunConfig, Path(recipe.name)), run, injected=Injected(faults=plan))
    return run


def test_a_run_is_resumed_from_any_directory(
    recipe: Path, half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    launch.train(load_config(RunConfig, recipe), tmp_path / "reference")
    launch.resume(half_done)
    assert_same_training(half_done, tmp_path / "reference")


def test_a_path_on_the_command_line_starts_at_the_working_directory(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of_recipe = load_config(RunConfig, recipe)
    given = load_config(RunConfig, recipe, ["task.jsonl.path=other.jsonl"])
    assert of_recipe.task.jsonl is not None
    assert given.task.jsonl is not None
    assert of_recipe.task.jsonl.path == str(recipe.parent / "data/min_max.jsonl")
    assert given.task.jsonl.path == str(tmp_path / "other.jsonl")
    assert config_digest(given) == config_digest(of_recipe)
    assert config_digest(given) != config_digest(
        load_config(RunConfig, recipe, ["task.jsonl.match=exact"])
    )


def test_a_file_that_was_moved_is_found_again(
    recipe: Path, half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.train(load_config(RunConfig, recipe), tmp_path / "reference")
    moved = tmp_path / "moved.jsonl"
    shutil.move(recipe.parent / "data/min_max.jsonl", moved)
    with pytest.raises(ConfigError, match=r"min_max\.jsonl: cannot be read") as caught:
        launch.resume(half_done)
    assert "task.jsonl.path=FILE (to `perdure resume` too" in caught.value.way_out
    result = CliRunner().invoke(
        app, ["resume", str(half_done), f"task.jsonl.path={os.path.relpath(moved)}"]
    )
    assert result.exit_code == 0, result.output
    assert_same_training(half_done, tmp_path / "reference")


def test_a_file_that_was_changed_is_refused(recipe: Path, half_done: Path) -> None:
    path = recipe.parent / "data/min_max.jsonl"
    path.write_text(min_max_jsonl(seed=4, count=300))
    with pytest.raises(ConfigError, match="the data has changed") as caught:
        launch.resume(half_done, [f"task.jsonl.path={path}"])
    assert "restore the data file" in caught.value.way_out
