"""What hostile and unlucky users do: one sentence and a documented exit code, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from drill_tools import RECIPE, assert_same_training
from typer.testing import CliRunner

from perdure import experience
from perdure.checkpoint import Migrations
from perdure.cli import checkpoints
from perdure.cli.main import app
from perdure.config import load_config
from perdure.core.clock import SystemClock
from perdure.core.faults import (
    FaultAction,
    FaultPlan,
    FaultPoint,
    FaultRule,
    InjectedFault,
    NoFaults,
)
from perdure.core.records import Checkpointed, Collect
from perdure.core.storage_api import Storage
from perdure.experience import ExperienceState, read_experience
from perdure.experience.reader import LogReport
from perdure.runtime.maintenance import Place
from perdure.runtime.migrating import migrate_run
from perdure.storage import PosixStorage
from perdure.trainers import launch, memory
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected
from perdure.trainers.progress import Progress


def perdure(*arguments: object) -> tuple[int, str]:
    """Exit code and output; an exception that is no exit fails the test with its traceback."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("broken") / "reference"
    launch.train(load_config(RunConfig, RECIPE), run)
    return run


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died in its fourth step, behind a checkpoint."""
    run = tmp_path_factory.mktemp("broken") / "run"
    plan = FaultPlan([FaultRule(FaultPoint.LOCAL_UPDATE_DONE, 7, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        launch.train(load_config(RunConfig, RECIPE), run, injected=Injected(faults=plan))
    # A process that is killed does not seal its log.
    (run / "seals/1.json").unlink()
    return run


@pytest.fixture
def half_done(cut_off: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut_off, tmp_path / "run"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1000000000000000000000", "64 bits"),
        ("trainer.total_steps=18446744073709551616", "64 bits"),
        ("rollout.temperature=1e-300", "greater than or equal to 0.0001"),
        ("threads=100000", "less than or equal to 1024"),
        ("learner.clip_high=1e308", "less than or equal to"),
        ("learner.value.clip=1e308", "less than or equal to"),
        ("rollout.sessions_per_group=1", "grpo compares the sessions of a group"),
    ],
)
def test_a_number_out_of_bounds(tmp_path: Path, override: str, words: str) -> None:
    code, message = perdure("train", RECIPE, override, "--run", tmp_path / "run")
    assert code == 2, message
    assert words in message


def test_rloo_has_no_rest_of_a_group_of_one(tmp_path: Path) -> None:
    """Every advantage would be 0, and nothing would ever be learned."""
    one = ("learner.algorithm=rloo", "rollout.sessions_per_group=1")
    code, message = perdure("train", RECIPE, *one, "--run", tmp_path / "run")
    assert code == 2, message
    assert "rloo compares the sessions of a group" in message


@pytest.mark.parametrize("key", ["a", "seed"])
def test_aliases_that_multiply_are_refused(tmp_path: Path, key: str) -> None:
    names = "abcdefghi"
    lines = [f"{key}: &a [{', '.join('x' * 10)}]"]
    lines += [f"{y}0: &{y} [{', '.join([f'*{x}'] * 10)}]" for x, y in pairwise(names)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    code, message = perdure("config", "show", tmp_path / "bomb.yaml")
    assert code == 2
    assert "values" in message


def test_an_alias_is_welcome(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.read_text().replace("seed: 7", "seed: &n 7\nthreads: *n"))
    assert load_config(RunConfig, path).threads == 7


@pytest.mark.parametrize(
    "override", ["model.hidden_size=100000000000", "rollout.slots=100000000000"]
)
def test_a_model_that_does_not_fit_into_memory(tmp_path: Path, override: str) -> None:
    code, message = perdure("train", RECIPE, override, "--run", tmp_path / "run")
    assert code == 2, message
    assert "memory" in message


def test_a_batch_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    """Refused at once and before there is a run, which a smaller one may then be."""
    run = tmp_path / "run"
    code, message = perdure("train", RECIPE, "trainer.train_batch_size=4000000000", "--run", run)
    assert code == 2, message
    assert "memory: trainer.train_batch_size = 4000000000 needs" in message
    assert not (run / "run.json").exists()


def test_a_batch_that_may_not_fit_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: memory.Memory(2**40, 1))
    warnings: list[object] = []

    def hear(name: str, fields: dict[str, object]) -> None:
        if name == "warning":
            warnings.append(fields["message"])

    config = load_config(RunConfig, RECIPE, ["trainer.total_steps=1"])
    launch.train(config, tmp_path / "run", display=hear)
    assert len(warnings) == 2
    assert "trainer.train_batch_size = 4 may need" in str(warnings[0])


def test_weights_that_break_while_generating(tmp_path: Path) -> None:
    """The failure of several sessions is one error."""
    code, message = perdure("train", RECIPE, "learner.adam.eps=1e-300", "--run", tmp_path / "run")
    assert code == 12, message
    assert "not finite" in message


def _empty_log(run: Path) -> None:
    for path in (run / "log").iterdir():
        path.unlink()


def _no_log(run: Path) -> None:
    shutil.rmtree(run / "log")


@pytest.mark.parametrize("lose", [_empty_log, _no_log])
def test_a_lost_log_is_noticed_before_anything_is_written(
    half_done: Path, reference: Path, lose: Callable[[Path], None], tmp_path: Path
) -> None:
    """It is never a fresh start, and what the message says to do works."""
    shutil.copytree(half_done / "log", tmp_path / "log")
    shutil.rmtree(half_done / "metrics")
    lose(half_done)
    assert perdure("audit", half_done)[0] == 5
    code, message = perdure("resume", half_done)
    assert code == 5, message
    assert "put log/ back" in message
    assert len(list((half_done / "incarnations").iterdir())) == 1
    shutil.copytree(tmp_path / "log", half_done / "log", dirs_exist_ok=True)
    assert perdure("resume", half_done)[0] == 0
    assert_same_training(half_done, reference)


def test_a_log_shorter_than_the_curve_is_noticed_before_the_incarnation_starts(
    half_done: Path,
) -> None:
    row = '{"global_step":50,"digest":"d","metrics":{},"timings_s":{}}\n'
    (half_done / "metrics/steps.jsonl").write_text(row)
    code, message = perdure("resume", half_done)
    assert code == 5, message
    assert "shows step 50" in message
    assert not list((half_done / "log").glob("*-000002-*"))


@pytest.mark.parametrize("value", ["1e400", "true", "null", '"7"', "[1]"])
def test_a_curve_with_a_strange_row_is_written_again(
    half_done: Path, reference: Path, value: str
) -> None:
    (half_done / "metrics/steps.jsonl").write_text(f'{{"global_step":{value},"digest":"d"}}\n')
    assert perdure("audit", half_done)[0] in (0, 5)
    assert perdure("resume", half_done)[0] == 0
    assert_same_training(half_done, reference)


@pytest.mark.parametrize(
    "path", ["metrics/steps.jsonl", "log/control-000001-000000.plog", "curve.png", "config.yaml"]
)
def test_a_directory_where_a_file_belongs(half_done: Path, path: str) -> None:
    file = half_done / path
    file.unlink(missing_ok=True)
    file.mkdir()
    for command in ("audit", "resume"):
        code, message = perdure(command, half_done)
        assert code in (0, 2, 5, 7), message
        assert code == 0 or path in message


@pytest.mark.parametrize("command", ["resume", "audit"])
def test_a_file_is_no_run(command: str) -> None:
    code, message = perdure(command, RECIPE)
    assert code == 6, message
    assert "no run here" in message


def test_a_run_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, message = perdure("train", RECIPE, "--run", tmp_path / "file")
    assert code == 7
    assert str(tmp_path / "file") in message
    assert "in the way" in message


@pytest.mark.parametrize("name", ["log", "incarnations", "seals", "checkpoints", "metrics"])
def test_the_audit_proves_nothing_of_what_it_cannot_read(
    half_done: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions do not stop root, so the refusal is put in."""
    listdir = os.listdir

    def refuse(path: str | Path) -> list[str]:
        if Path(path) == half_done / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    code, message = perdure("audit", half_done)
    assert code == 7, message
    assert f"{half_done / name}: cannot open" in message


def test_a_live_run_may_collect_a_checkpoint_while_it_is_verified(
    half_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkpoints.committed_checkpoints(PosixStorage(half_done))
    log_as_read = iter([before])
    assert len(before) == 2

    def committed(_: Storage) -> list[Checkpointed]:
        shutil.rmtree(half_done / "checkpoints" / before[0].directory, ignore_errors=True)
        return next(log_as_read, before[1:])

    monkeypatch.setattr(checkpoints, "committed_checkpoints", committed)
    code, output = perdure("ckpt", "verify", half_done)
    assert code == 0, output
    assert before[0].directory not in output


def test_a_live_run_may_collect_a_checkpoint_while_they_are_listed(
    half_done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkpoints.committed_checkpoints(PosixStorage(half_done))
    gone = before[0].directory

    def read(storage: Storage) -> tuple[ExperienceState, LogReport]:
        state, report = read_experience(storage)
        state.apply(None, Collect((gone,)))
        shutil.rmtree(half_done / "checkpoints" / gone)
        return state, report

    monkeypatch.setattr(experience, "read_experience", read)
    code, output = perdure("ckpt", "list", half_done)
    assert code == 0, output
    assert gone not in output
    assert before[1].directory in output


def test_a_run_tidied_between_its_incarnations_trains_the_same(
    half_done: Path, reference: Path
) -> None:
    """What gc writes into the log changes no training, and the redo still happens."""
    newest = checkpoints.committed_checkpoints(PosixStorage(half_done))[-1].directory
    code, output = perdure("ckpt", "gc", half_done, "--keep", "1")
    assert (code, f"{newest} kept" in output, "deleted" in output) == (0, True, True), output
    code, output = perdure("resume", half_done)
    assert code == 0, output
    assert "redone" in output
    assert_same_training(half_done, reference)
    assert perdure("audit", half_done)[0] == 0


def test_a_run_goes_on_from_a_migrated_checkpoint(
    half_done: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations = Migrations()
    migrations.step("progress", 1)(lambda state: state)
    done = migrate_run(Place(PosixStorage(half_done), SystemClock(), NoFaults()), migrations)
    assert done.versions == {"progress": (1, 2)}
    monkeypatch.setattr(Progress, "schema_version", 2)
    code, output = perdure("resume", half_done)
    assert code == 0, output
    events = [json.loads(x) for x in (half_done / "events.jsonl").read_text().splitlines()]
    assert [e["name"] for e in events if e["event"] == "restored"] == [done.target]
    assert "redone" in output
    assert_same_training(half_done, reference)
    assert perdure("audit", half_done)[0] == 0


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", ">/dev/full"])
def test_closed_streams_change_nothing(tmp_path: Path, reference: Path, closed: str) -> None:
    """A log that got the descriptor of a closed stream would be written into by a library."""
    run = tmp_path / "run"
    command = f'"{sys.executable}" -c "from perdure.cli.main import main; main()"'
    train = f'{command} train "{RECIPE}" --run "{run}" {closed}'
    ended = subprocess.run(["sh", "-c", train], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert_same_training(run, reference)
