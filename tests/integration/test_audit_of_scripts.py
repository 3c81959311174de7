"""`perdure audit` of a script's run: what it is, what was checked, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from perdure import CheckpointEngine, every
from perdure.cli.main import app


def script(run: Path, *, leave_at: int = 0) -> Path:
    """A loop of 6 steps that saves every second one; every save is kept."""
    engine = CheckpointEngine(run, save=every(steps=2), keep=9)
    engine.register(weights=np.zeros(4))
    for step in engine.steps(6):
        if step == leave_at:
            break
    return run


def audit(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_run_of_a_script_is_called_so_and_nothing_is_said_of_groups(tmp_path: Path) -> None:
    run = script(tmp_path / "run")
    code, text = audit(run)
    assert code == 0
    verdict, what, *counts = text.splitlines()
    assert verdict == f"audit of {run}: its checkpoints and their log hold"
    assert what == (
        "  the run of a script, which logs no experience: checked are checkpoints and their log"
    )
    assert [line.split(":")[0].strip() for line in counts] == ["incarnations", "log", "checkpoints"]
    assert counts[-1].startswith("  checkpoints: committed 3, bytes ")
    report = json.loads(audit(run, "--json")[1])
    assert (report["ok"], report["script"]) == (True, True)


def test_one_that_has_saved_nothing_yet_says_how_many_checkpoints_there_are(tmp_path: Path) -> None:
    run = script(tmp_path / "run", leave_at=1)
    code, text = audit(run)
    assert code == 0
    assert "the run of a script" in text
    assert "checkpoints: committed 0, bytes 0" in text


def test_a_damaged_checkpoint_of_a_script_is_found(tmp_path: Path) -> None:
    run = script(tmp_path / "run")
    (file,) = (run / "checkpoints" / "step-00000004-1" / "tensors").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    code, text = audit(run)
    assert code == 5
    assert f"audit of {run}: NOT PROVED (1 problem)" in text
    assert "the run of a script" in text
    assert f"damage: checkpoints/step-00000004-1/tensors/{file.name}: " in text


def test_runs_of_scripts_are_not_called_equal_for_what_they_do_not_log(tmp_path: Path) -> None:
    first, second = script(tmp_path / "a"), script(tmp_path / "b")
    code, text = audit(first, "--diff", second)
    assert code == 2
    assert "equal" not in text
    assert f"{first}: the run of a script logs nothing that was trained; " in text
    assert "`perdure ckpt diff RUN RUN2`" in text
