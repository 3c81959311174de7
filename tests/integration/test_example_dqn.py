"""The example script as a person runs it: started, stopped by SIGTERM, killed, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from perdure.experience import read_experience
from perdure.storage import PosixStorage

EXAMPLE = Path(__file__).parents[2] / "examples" / "dqn.py"
DEADLINE_S = 100.0


def start(run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), str(run), "--steps", "4000"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it said, once it has ended well."""
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    return said


def wait_for_save(run: Path, incarnation: int, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not list(run.glob(f"checkpoints/step-*-{incarnation}/manifest.json")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_stopped_killed_and_started_again_it_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    expected = finish(start(tmp_path / "reference")).splitlines()[-1]
    assert expected.startswith("done: {'cell'")
    run = tmp_path / "run"
    for incarnation, number in enumerate((signal.SIGTERM, signal.SIGKILL), start=1):
        process = start(run)
        wait_for_save(run, incarnation, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == (143 if number == signal.SIGTERM else -9), said
    assert finish(start(run)).splitlines()[-1] == expected
    state, _ = read_experience(PosixStorage(run))
    assert state.checkpoints[-1].step == 4000
    assert len(state.incarnations) == 3


def test_its_five_lines_are_those_of_the_documentation() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "checkpoint.md").read_text()
    assert "examples/dqn.py" in page
    for line in (
        "from perdure import CheckpointEngine, every",
        "engine = CheckpointEngine(",
        "engine.register(",
        'rng="all"',
        "in engine.steps(total)",
    ):
        assert line in EXAMPLE.read_text()
        assert line in page
