"""Every recipe in the repository loads, and trains when its counts are cut down."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from perdure.audit import audit_run
from perdure.config import load_config
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SHORT = (
    "trainer.total_steps=1",
    "trainer.train_batch_size=8",
    "learner.supervised.steps=2",
    "learner.supervised.batch_size=8",
    "validation.prompts=8",
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parents[1])
    launch.train(load_config(RunConfig, recipe, SHORT), tmp_path / "run")
    report = audit_run(tmp_path / "run")
    assert report.ok, "\n".join(report.summary_lines())


def test_the_recipes_of_the_documentation_are_there() -> None:
    assert {"sort_digits", "tiny"} <= {recipe.stem for recipe in RECIPES}


def test_the_complete_recipe_of_the_tasks_page_runs(tmp_path: Path) -> None:
    page = (RECIPES[0].parents[1] / "docs" / "tasks.md").read_text()
    (recipe,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "mine.jsonl" in b]
    (tmp_path / "my_recipe.yaml").write_text(recipe)
    lines = [{"prompt": f"{i}?", "answer": f"{i + 1}"} for i in range(100)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    short = ("trainer.total_steps=1", "learner.supervised.steps=2")
    config = load_config(RunConfig, tmp_path / "my_recipe.yaml", short)
    launch.train(config, tmp_path / "run")
    (last,) = (tmp_path / "run/metrics/evaluations.jsonl").read_text().splitlines()[-1:]
    assert 0 < json.loads(last)["metrics"]["prompts"] < 100
