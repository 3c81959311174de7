"""The command line through its runner: help, errors, exit codes, and what each command hands on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from perdure import __version__
from perdure.cli import main as cli
from perdure.core.errors import InterruptError, PerdureError, StoppedError, StorageError

RUNNER = CliRunner()


def run(*arguments: str) -> tuple[int, str, str]:
    result = RUNNER.invoke(cli.app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result.exit_code, result.stdout, result.stderr


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    command = command or typer.main.get_command(cli.app)
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        if hasattr(inner, "commands"):
            yield from commands(inner, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_help_has_an_example(path: tuple[str, ...]) -> None:
    code, out, _ = run(*path, "--help")
    assert code == 0
    assert "Example" in out
    assert f"perdure {' '.join(path)}".strip() in out


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_help_shows_a_flag_without_a_type(path: tuple[str, ...]) -> None:
    _, out, _ = run(*path, "--help")
    assert re.search("--help +Show this message", out)
    assert "bool" not in out.lower()


def test_version() -> None:
    assert run("--version") == (0, f"perdure {__version__}\n", "")


def test_a_mistyped_command_names_the_nearest() -> None:
    code, _, err = run("trian")
    assert code == 2
    assert "did you mean 'train'?" in err


def test_a_task_without_its_file_is_told_of_it_beside_what_is_left_over() -> None:
    code, _, err = run("train", "recipes/tiny.yaml", "task.name=jsonl")
    assert code == 2
    _, name, digits = err.splitlines()
    assert name.strip() == (
        'command line: task.name = "jsonl": needs task.jsonl.path, which is missing;'
        " way out: set task.jsonl.path=FILE (see docs/tasks.md)"
    )
    assert digits.startswith("  recipes/tiny.yaml: task.digits = {")
    assert "task.digits={} does so on the command line" in digits
    # Both ways out, taken: nothing is left but to read the file.
    _, _, err = run(
        "train", "recipes/tiny.yaml", "task.name=jsonl", "task.digits={}", "task.jsonl.path=none"
    )
    assert "cannot be read" in err
    assert "problems" not in err


def test_a_missing_recipe_is_one_sentence_and_its_code(tmp_path: Path) -> None:
    code, out, err = run("train", str(tmp_path / "none.yaml"))
    assert (code, out) == (6, "")
    assert err.startswith(f"perdure: {tmp_path}/none.yaml: no such recipe; ")
    assert err.count("\n") == 1


def test_a_bad_setting_is_one_sentence_and_its_code(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("sede: 1\n")
    code, _, err = run("config", "show", str(recipe), "seed=x")
    assert code == 2
    assert "did you mean 'seed'?" in err
    assert 'command line: seed = "x"' in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["resume"],
        ["audit"],
        ["ckpt", "list"],
        ["ckpt", "verify"],
        ["ckpt", "show"],
    ],
)
def test_a_missing_run_names_the_nearest(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "tiny-1").mkdir()
    (tmp_path / "tiny-1" / "run.json").write_text("{}")
    code, _, err = run(*arguments, str(tmp_path / "tiny-11"))
    assert code == 6
    assert f"did you mean '{tmp_path}/tiny-1'?" in err
    assert not (tmp_path / "tiny-11").exists()


def _fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("perdure.cli.ckpt.open_run", fail)


def _errors(cls: type[PerdureError] = PerdureError) -> Iterator[type[PerdureError]]:
    yield cls
    for inner in cls.__subclasses__():
        yield from _errors(inner)


@pytest.mark.parametrize("error", list(_errors()), ids=lambda cls: cls.__name__)
def test_every_error_has_its_exit_code(
    error: type[PerdureError], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_with(error("it broke", where="here", way_out="mend it"), monkeypatch)
    assert run("ckpt", "list", "x") == (
        error.exit_code,
        "",
        "perdure: here: it broke; way out: mend it\n",
    )


def test_errors_are_json_for_programs(tmp_path: Path) -> None:
    code, out, err = run("ckpt", "list", str(tmp_path / "none"), "--json")
    assert (code, out) == (6, "")
    error = json.loads(err)["error"]
    assert error == {
        "what": "no run here",
        "where": str(tmp_path / "none"),
        "rule": "a run directory holds run.json",
        "way_out": error["way_out"],
        "code": 6,
    }
    code, out, err = run("ckpt", "list", "--json")
    assert (code, out) == (2, "")
    assert "RUN" in json.loads(err)["error"]["what"]
    assert run("ckpt", "list", str(tmp_path / "none"))[2].startswith("perdure: ")


def test_a_setting_written_as_an_option_is_shown_as_a_setting() -> None:
    code, _, err = run("train", "r.yaml", "--seed", "7")
    assert code == 2
    assert "no option --seed" in err
    assert "write seed=VALUE" in err
    assert "--take-over" in run("resume", "x", "--take-ovr")[2]


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_run_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    code, _, err = run("train", "r.yaml", "--run", name)
    assert code == 2
    assert "--run is empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_an_error_names_the_run_it_is_about(
    launched: list[tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import perdure.trainers.launch as launch

    def fail(*_: object, **__: object) -> None:
        raise StorageError("broke", where="lock")

    monkeypatch.setattr(launch, "resume", fail)
    monkeypatch.setattr("perdure.experience.read_run", lambda _: None)
    assert run("resume", str(tmp_path))[2] == f"perdure: {tmp_path}: lock: broke\n"


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(KeyboardInterrupt(), monkeypatch)
    assert run("ckpt", "list", "x")[0] == 130


def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(ZeroDivisionError(), monkeypatch)
    result = RUNNER.invoke(cli.app, ["ckpt", "list", "x"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_exit_codes_are_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "exit-codes.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    documented = {int(row.split("|")[1]): row.split("|")[2].strip(" `") for row in rows[1:]}
    own = [error for error in _errors() if "exit_code" in vars(error)]
    expected = {error.exit_code: error.__name__ for error in own}
    assert len(expected) == len(own)
    assert documented == {0: "success", **expected, cli.READER_LEFT: "reader left"}
    assert InterruptError.exit_code == cli.INTERRUPTED


def test_a_recipe_is_read_without_torch() -> None:
    script = (
        "import sys, perdure.trainers.config\n"
        "print([m for m in ('torch', 'matplotlib', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_help_loads_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, perdure.cli.main\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


RECIPE = "task: {name: sort_digits}\n"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Stands in for the trainer: records calls and leaves the metrics files of a short run."""
    import perdure.trainers.launch as launch

    calls: list[tuple[object, ...]] = []

    def leave_metrics(run_dir: Path) -> None:
        (run_dir / "metrics").mkdir(parents=True)
        row = {"global_step": 3, "digest": "d", "metrics": {"reward": 0.5}, "timings_s": {}}
        (run_dir / "metrics" / "steps.jsonl").write_text(json.dumps(row) + "\n")
        rows = [
            {"global_step": s, "digest": "d", "metrics": {"accuracy": a}, "timings_s": {}}
            for s, a in ((0, 0.25), (3, 0.875))
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run_dir / "metrics" / "evaluations.jsonl").write_text(text)

    def train(config: Any, run_dir: Path, *, display: Any) -> None:
        calls.append(("train", config.seed, run_dir))
        display("step", {"global_step": 3, "reward": 0.5, "seconds": 1.5})
        display("log_committed", {"records": 1, "bytes": 2, "fsync_ms": 3.0})
        leave_metrics(run_dir)

    def resume(
        run_dir: Path, overrides: Sequence[str], *, take_over: bool, redo: bool, display: Any
    ) -> None:
        del display
        calls.append(("resume", run_dir, overrides, take_over, redo))
        leave_metrics(run_dir)

    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(launch, "resume", resume)
    return calls


def test_train_shows_steps_and_the_summary(
    launched: list[tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    Path("runs/r-1").mkdir(parents=True)
    code, out, err = run("train", "r.yaml", "seed=9")
    assert (code, err) == (0, "")
    assert launched == [("train", 9, Path("runs/r-2"))]
    assert out.splitlines() == [
        "step global_step=3 reward=0.5 seconds=1.5",
        "run runs/r-2: 3 global steps",
        "held-out accuracy 0.88 (before training 0.25)",
        "curve runs/r-2/curve.png",
    ]
    assert Path("runs/r-2/curve.png").read_bytes().startswith(b"\x89PNG")


def test_train_in_json(launched: list[tuple[object, ...]], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    run_dir = tmp_path / "x"
    code, out, _ = run("train", str(tmp_path / "r.yaml"), "--run", str(run_dir), "--json")
    assert code == 0
    assert launched == [("train", 1, run_dir)]
    step, log, summary = (json.loads(line) for line in out.splitlines())
    assert step == {"event": "step", "global_step": 3, "reward": 0.5, "seconds": 1.5}
    assert log["event"] == "log_committed"
    assert summary == {
        "event": "summary",
        "run": str(run_dir),
        "global_steps": 3,
        "first_accuracy": 0.25,
        "last_accuracy": 0.875,
        "curve": str(run_dir / "curve.png"),
        "warm_start": False,
    }


@pytest.mark.parametrize(
    ("options", "overrides", "take_over", "redo"),
    [
        ([], (), False, True),
        (["--take-over"], (), True, True),
        (["--no-redo"], (), False, False),
        (["checkpoint.keep=3"], ["checkpoint.keep=3"], False, True),
    ],
)
def test_resume_hands_its_options_on(
    launched: list[tuple[object, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    overrides: Sequence[str],
    take_over: bool,
    redo: bool,
) -> None:
    monkeypatch.setattr("perdure.experience.read_run", lambda _: None)
    assert run("resume", str(tmp_path), *options)[0] == 0
    assert launched == [("resume", tmp_path, overrides, take_over, redo)]


@pytest.mark.parametrize("error", [StoppedError, InterruptError])
def test_a_stopped_run_has_its_curve_and_says_how_to_go_on(
    launched: list[tuple[object, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[StoppedError],
) -> None:
    import perdure.trainers.launch as launch

    train = launch.train

    def stop(config: Any, run_dir: Path, **rest: Any) -> None:
        train(config, run_dir, **rest)
        raise error("stopped", where=str(run_dir), way_out=f"go on with `perdure resume {run_dir}`")

    monkeypatch.setattr(launch, "train", stop)
    (tmp_path / "r.yaml").write_text(RECIPE)
    run_dir = tmp_path / "x"
    code, out, err = run("train", str(tmp_path / "r.yaml"), "--run", str(run_dir))
    assert code == error.exit_code
    assert err == f"perdure: {run_dir}: stopped; way out: go on with `perdure resume {run_dir}`\n"
    assert "held-out accuracy" not in out
    assert (run_dir / "curve.png").is_file()


def test_ctrl_c_before_anything_is_imported_is_quiet() -> None:
    script = (
        "import os, signal, sys\n"
        "from perdure.cli import entry\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'perdure.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "entry.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_failed_run_shows_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import perdure.trainers.launch as launch

    def fail(*_: object, **__: object) -> None:
        raise StorageError("disk full", where="log", way_out="free space")

    monkeypatch.setattr(launch, "train", fail)
    (tmp_path / "r.yaml").write_text(RECIPE)
    code, out, err = run("train", str(tmp_path / "r.yaml"), "--run", str(tmp_path / "x"))
    where = f"{tmp_path / 'x'}: log"
    assert (code, out, err) == (7, "", f"perdure: {where}: disk full; way out: free space\n")


def test_config_show_prints_what_loads_again(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    code, out, _ = run("config", "show", str(recipe), "seed=5")
    assert code == 0
    assert "seed: 5\n" in out
    assert "reasoning_gym" not in out, "sections of other tasks"
    explained = run("config", "show", str(recipe), "seed=5", "--explain")[1]
    for text in (out, explained):
        recipe.write_text(text)
        assert run("config", "show", str(recipe))[1] == out
    assert "# Base learning rate of the actor. (a number, above 0" in explained
    shown = json.loads(run("config", "show", str(recipe), "--json")[1])
    assert shown["config"]["seed"] == 5
    assert len(shown["digest"]) == 32
