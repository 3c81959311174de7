"""What `perdure train` says of an earlier run of the same recipe that was left unfinished."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from drill_tools import RECIPE
from typer.testing import CliRunner

from perdure.cli.main import app
from perdure.config import load_config
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.experience.claims import LOCK_FILE
from perdure.storage import PosixStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected

SMALL = ("trainer.total_steps=1", "learner.supervised.steps=1")
LEFT = Path("runs/tiny-1")
HINT = "runs/tiny-1 is not finished: `perdure resume runs/tiny-1` goes on with it"


def train(*overrides: str) -> str:
    """What the command says that starts the next run."""
    result = CliRunner().invoke(app, ["train", "tiny.yaml", *SMALL, *overrides])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that ended before it was finished, the first one below the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(RECIPE, "tiny.yaml")
    plan = FaultPlan([FaultRule(FaultPoint.WARM_START_STEP, 1, FaultAction.RAISE)])
    config = load_config(RunConfig, Path("tiny.yaml"), SMALL)
    with pytest.raises(InjectedFault):
        launch.train(config, LEFT, injected=Injected(faults=plan))
    return tmp_path / LEFT


def test_an_unfinished_run_of_the_same_recipe_is_named_until_it_is_finished(left: Path) -> None:
    assert train().splitlines()[0] == HINT
    assert Path("runs/tiny-2/run.json").exists()
    rows = [json.loads(line) for line in train("--json").splitlines()]
    assert {"event": "note", "message": HINT} in rows
    launch.resume(left)
    assert "not finished" not in train()


def test_a_run_that_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(RECIPE, "tiny.yaml")
    main = "from perdure.cli.entry import main; main()"
    command = [sys.executable, "-c", main, "train", "tiny.yaml", "trainer.total_steps=100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                process.kill()
    assert LEFT.is_dir()
    assert "not finished" not in train()
    # The same settings again, and this one says it at once.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{HINT}\n"
        process.kill()


def other_settings(left: Path) -> tuple[str, ...]:
    assert left.is_dir()
    return ("seed=99",)


def a_directory_of_its_own(left: Path) -> tuple[str, ...]:
    return ("--run", str(left.parent / "mine"))


@pytest.mark.parametrize("settings", [other_settings, a_directory_of_its_own])
def test_another_run_is_no_concern_of_the_one_that_is_left(
    left: Path, settings: Callable[[Path], tuple[str, ...]]
) -> None:
    assert "not finished" not in train(*settings(left))


def test_one_that_a_process_works_on_is_not_called_left(left: Path) -> None:
    lock = PosixStorage(left).lock(LOCK_FILE)
    assert lock is not None
    assert "not finished" not in train()
    lock.release()
    assert HINT in train()


def flip(left: Path) -> None:
    data = bytearray((left / "run.json").read_bytes())
    data[len(data) // 2] ^= 1
    (left / "run.json").write_bytes(data)


def remove(left: Path) -> None:
    (left / "run.json").unlink()


def replace_by_a_file(left: Path) -> None:
    shutil.rmtree(left)
    left.touch()


def replace_its_file_by_a_folder(left: Path) -> None:
    remove(left)
    (left / "run.json").mkdir()


def lose_the_claims(left: Path) -> None:
    shutil.rmtree(left / "incarnations")
    (left / LOCK_FILE).unlink()


@pytest.mark.parametrize(
    "damage",
    [flip, remove, replace_by_a_file, replace_its_file_by_a_folder, lose_the_claims],
)
def test_a_damaged_neighbour_stops_nobody(left: Path, damage: Callable[[Path], None]) -> None:
    damage(left)
    assert "not finished" not in train()
    assert Path("runs/tiny-2/run.json").exists()
