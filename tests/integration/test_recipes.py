"""Every recipe in the repository loads, and trains when its counts are cut down."""

from __future__ import annotations

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
