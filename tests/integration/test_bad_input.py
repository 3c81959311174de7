"""Every kind of bad input: one clear sentence with the way out, a documented exit code, no loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from drill_tools import RECIPE, assert_same_training
from typer.testing import CliRunner

from perdure.cli.main import app
from perdure.config import load_config
from perdure.core import sealed_json
from perdure.core.errors import StorageError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.storage import FaultyStorage, PosixStorage, StorageFault, StorageFaultKind
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected


def refused(*arguments: object) -> tuple[int, str]:
    """Exit code and message of a command that has to be refused."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code != 0, result.output
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def half_done(tmp_path: Path) -> Path:
    """A run that was cut off in its fourth step."""
    run = tmp_path / "run"
    plan = FaultPlan([FaultRule(FaultPoint.LOCAL_UPDATE_DONE, 7, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.train(load_config(RunConfig, RECIPE), run, injected=Injected(faults=plan))
    return run


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("learner.lrr=1", 2, ["learner.lrr", "learner.lr"]),
        ("trainer.total_steps=many", 2, ["trainer.total_steps", "many"]),
        ("trainer.train_batch_size=5", 2, ["train_batch_size", "5", "multiple", "=6"]),
        ("learner.mini_batches=3", 2, ["mini_batches", "must divide", "way out"]),
        ("task.name=sort_digit", 2, ["sort_digits"]),
        ("mode=asynch", 2, ["mode", "sync"]),
        ("rollout.max_new_tokens=2", 2, ["max_new_tokens", "need up to 4", "way out"]),
        ("validation.prompts=100000", 2, ["held-out"]),
    ],
)
def test_a_setting_that_cannot_be(
    tmp_path: Path, override: str, code: int, words: list[str]
) -> None:
    status, message = refused("train", RECIPE, override, "--run", tmp_path / "run")
    assert status == code, message
    for word in words:
        assert word in message
    assert not (tmp_path / "run/run.json").exists()


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    _, message = refused(
        "train", RECIPE, "learner.lrr=1", "trainer.train_batch_size=5", "--run", tmp_path / "run"
    )
    assert "learner.lrr" in message
    assert "train_batch_size" in message


def test_a_recipe_that_is_not_there() -> None:
    status, message = refused("train", RECIPE.with_name("drill_recipes.yaml"))
    assert status == 6
    assert "drill_recipe.yaml" in message


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    status, message = refused("train", RECIPE, "--run", tmp_path / "file" / "run")
    assert status == 7, message


def test_training_over_an_existing_run(half_done: Path) -> None:
    status, message = refused("train", RECIPE, "--run", half_done)
    assert status == 2
    assert f"perdure resume {half_done}" in message


def test_resuming_what_is_no_run(tmp_path: Path) -> None:
    status, message = refused("resume", tmp_path / "nothing")
    assert status == 6
    assert "run.json" in message


def test_a_run_that_a_live_process_holds(half_done: Path) -> None:
    lock = PosixStorage(half_done).lock("lock")
    assert lock is not None
    try:
        status, message = refused("resume", half_done)
    finally:
        lock.release()
    assert status == 3
    assert "--take-over" in message


def test_a_changed_configuration(half_done: Path) -> None:
    path = half_done / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.002"))
    status, message = refused("resume", half_done)
    assert status == 2
    assert "config.yaml" in message


def _newer_manifest(run: Path) -> None:
    for path in run.glob("checkpoints/*/manifest.json"):
        value = sealed_json.decode(path.read_bytes(), where="", newest_format=1)
        path.write_bytes(sealed_json.encode({**value, "format": 2}))


def _newer_run(run: Path) -> None:
    value = sealed_json.decode((run / "run.json").read_bytes(), where="", newest_format=1)
    (run / "run.json").write_bytes(sealed_json.encode({**value, "format": 2}))


@pytest.mark.parametrize("make_newer", [_newer_run, _newer_manifest])
def test_a_run_of_a_newer_format(
    half_done: Path, make_newer: Callable[[Path], None], tmp_path: Path
) -> None:
    make_newer(half_done)
    before = {path: path.read_bytes() for path in half_done.glob("log/*")}
    status, message = refused("resume", half_done)
    # A manifest's digest is in the log, so an edited one is damage before it is of a newer format.
    assert status == (9 if make_newer is _newer_run else 5), message
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path) -> None:
    """The log refuses for good: one sentence; with space again the run goes on."""
    config = load_config(RunConfig, RECIPE)
    launch.train(config, tmp_path / "reference")
    run = tmp_path / "run"
    full = [StorageFault(StorageFaultKind.NO_SPACE, hit, "log/payload") for hit in range(4, 40)]
    storage = FaultyStorage(PosixStorage(run), plan=full)
    with pytest.raises(StorageError, match="way out"):
        launch.train(config, run, injected=Injected(storage=storage))
    assert storage.fired[StorageFaultKind.NO_SPACE] > 0
    launch.resume(run)
    assert_same_training(run, tmp_path / "reference")


def test_a_disk_too_full_for_checkpoints_does_not_stop_training(tmp_path: Path) -> None:
    config = load_config(RunConfig, RECIPE)
    run = tmp_path / "run"
    full = [StorageFault(StorageFaultKind.NO_SPACE, 1, "checkpoints/step-00000002")]
    storage = FaultyStorage(PosixStorage(run), plan=full)
    events: list[str] = []
    launch.train(
        config, run, injected=Injected(storage=storage), display=lambda name, _: events.append(name)
    )
    assert storage.fired[StorageFaultKind.NO_SPACE] == 1
    assert events.count("checkpoint_failed") == 1
    assert "run_finished" in events


def test_a_damaged_newest_checkpoint_falls_back_and_redoes(tmp_path: Path) -> None:
    config = load_config(RunConfig, RECIPE)
    launch.train(config, tmp_path / "reference")
    run = tmp_path / "run"
    plan = FaultPlan([FaultRule(FaultPoint.STEP_DONE, 5, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.train(config, run, injected=Injected(faults=plan))
    newest = run / "checkpoints/step-00000004-1/model/policy.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    events: dict[str, dict[str, object]] = {}
    launch.resume(run, display=events.setdefault)
    assert events["checkpoint_damaged"]["name"] == "step-00000004-1"
    assert events["restored"]["name"] == "step-00000002-1"
    assert (run / "quarantine/step-00000004-1").is_dir()
    assert_same_training(run, tmp_path / "reference")


def test_no_valid_checkpoint_is_never_a_fresh_start(half_done: Path) -> None:
    shutil.rmtree(half_done / "checkpoints")
    status, message = refused("resume", half_done)
    assert status == 5
    assert "never started afresh" in message
