"""Every kind of bad input: one clear sentence with the way out, a documented exit code, no loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from drill_tools import RECIPE, Events, assert_same_training
from typer.testing import CliRunner

from perdure.audit import audit_run
from perdure.cli.main import app
from perdure.config import load_config
from perdure.core import sealed_json
from perdure.core.errors import StorageError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.experience import read_experience
from perdure.learner import update
from perdure.learner.descent import StepOutcome
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


def test_training_into_a_directory_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    status, message = refused("train", RECIPE, "--run", tmp_path)
    assert status == 2
    assert "not empty (it holds notes.txt)" in message
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_training_over_a_run_that_is_alive(half_done: Path) -> None:
    lock = PosixStorage(half_done).lock("lock")
    assert lock is not None
    try:
        status, message = refused("train", RECIPE, "--run", half_done)
    finally:
        lock.release()
    assert status == 3
    assert "perdure resume" not in message


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


def _edited(text: bytes) -> bytes:
    return text.replace(b"lr: 0.001", b"lr: 0.002")


def _bad_yaml(text: bytes) -> bytes:
    return text.replace(b"seed: 7", b"seed: [7")


def _misspelt(text: bytes) -> bytes:
    return text.replace(b"total_steps", b"total_steqs")


def _not_utf8(text: bytes) -> bytes:
    return text.replace(b"sort_digits", b"sort_\xe4igits")


def _cut(text: bytes) -> bytes:
    return text[:40]


def _empty(text: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [_edited, _bad_yaml, _misspelt, _not_utf8, _cut, _empty])
def test_a_damaged_configuration(
    half_done: Path, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """The run's file is named, nothing is said about recipes, and both ways out work."""
    path = half_done / "config.yaml"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    status, message = refused("resume", half_done)
    assert status == 5
    for words in (f"{path}: is damaged", "restore the file from a copy", "config show"):
        assert words in message
    for words in ("did you mean", "a recipe", "way out: correct"):
        assert words not in message
    shown = CliRunner().invoke(app, ["config", "show", str(RECIPE)])
    path.write_text(shown.stdout)
    launch.train(load_config(RunConfig, RECIPE), tmp_path / "reference")
    launch.resume(half_done)
    assert_same_training(half_done, tmp_path / "reference")


@pytest.mark.parametrize("override", ["learner.lr=0.5", "trainer.total_steps=9", "seed=8"])
def test_a_resume_takes_no_setting_that_changes_the_training(
    half_done: Path, override: str
) -> None:
    status, message = refused("resume", half_done, override)
    assert status == 2
    for words in (override, "checkpoint.*", "start a new run"):
        assert words in message
    status, message = refused("resume", half_done, "checkpoint.keeep=3")
    assert status == 2
    assert "checkpoint.keep" in message


def test_a_resume_takes_settings_that_do_not(half_done: Path, tmp_path: Path) -> None:
    launch.train(load_config(RunConfig, RECIPE), tmp_path / "reference")
    kept = (half_done / "config.yaml").read_bytes()
    events = Events()
    launch.resume(half_done, ["checkpoint.every_steps=1", "checkpoint.keep=9"], display=events)
    # A save that is due while two others are being written is skipped, not waited for.
    due = [*events.of("checkpoint_staged"), *events.of("checkpoint_skipped")]
    assert {fields["step"] for fields in due} == {3, 4, 5, 6}
    kept_steps = {path.name for path in (half_done / "checkpoints").glob("step-*-2")}
    assert len(kept_steps) == len(events.of("checkpoint_staged"))
    assert (half_done / "config.yaml").read_bytes() == kept
    assert_same_training(half_done, tmp_path / "reference")


def test_the_advice_of_a_step_that_is_not_finite_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def descend_into_nothing(*arguments: object, **options: object) -> StepOutcome:
        return StepOutcome(float("nan"), reason="loss is not finite")

    run = tmp_path / "run"
    overrides = ["learner.nonfinite=raise", "learner.supervised.steps=0"]
    with monkeypatch.context() as patch:
        patch.setattr(update, "descend", descend_into_nothing)
        status, message = refused("train", RECIPE, *overrides, "--run", run)
        assert status == 12
        assert "perdure resume RUN learner.nonfinite=skip" in message
        launch.resume(run, ["learner.nonfinite=skip"])
    state, _ = read_experience(PosixStorage(run))
    assert state.last_step == 6
    assert all(record.skipped for record in state.step_done.values())
    assert audit_run(run).ok


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


@pytest.mark.parametrize("path", ["config.yaml", "incarnations", "log", "run.json"])
def test_a_disk_that_is_full_before_the_run_exists(tmp_path: Path, path: str) -> None:
    """There is nothing to resume; with space again the same command goes on from the leftovers."""
    config = load_config(RunConfig, RECIPE)
    run = tmp_path / "run"
    full = [StorageFault(StorageFaultKind.NO_SPACE, 1, path)]
    storage = FaultyStorage(PosixStorage(run), plan=full)
    with pytest.raises(StorageError) as caught:
        launch.train(config, run, injected=Injected(storage=storage))
    assert storage.fired[StorageFaultKind.NO_SPACE] == 1
    assert caught.value.way_out == "free space on this file system, then start it again"
    assert not (run / "run.json").exists()
    launch.train(config, run)
    launch.train(config, tmp_path / "reference")
    assert_same_training(run, tmp_path / "reference")


def test_a_disk_that_is_full_when_the_run_exists_says_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    full = [StorageFault(StorageFaultKind.NO_SPACE, 1, "incarnations/1.json")]
    storage = FaultyStorage(PosixStorage(run), plan=full)
    with pytest.raises(StorageError, match="free space on this file system, then resume"):
        launch.train(load_config(RunConfig, RECIPE), run, injected=Injected(storage=storage))


@pytest.mark.parametrize("left", ["incarnations", "log", "checkpoints"])
def test_nothing_is_started_over_what_may_be_experience(half_done: Path, left: str) -> None:
    (half_done / "run.json").unlink()
    for name in {"incarnations", "seals", "log", "checkpoints"} - {left}:
        shutil.rmtree(half_done / name)
    before = sorted(half_done.rglob("*"))
    status, message = refused("train", RECIPE, "--run", half_done)
    assert status == 5
    assert "run.json: is missing" in message
    assert left in message
    assert [path for path in sorted(half_done.rglob("*")) if path.name != "create.lock"] == [
        path for path in before if path.name != "create.lock"
    ]


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
