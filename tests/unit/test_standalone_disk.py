"""A run directory on a real disk: forks, files of others, and what stands where a file should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perdure import CheckpointEngine, every
from perdure.audit import audit_run
from perdure.checkpoint import ReplayRing
from perdure.core.events import ignore_events
from perdure.experience import read_experience
from perdure.storage import PosixStorage


def test_a_forked_worker_that_leaves_the_loop_touches_nothing(tmp_path: Path) -> None:
    """However it leaves: it must not wait for the parent's threads, nor write the parent's run."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from perdure import CheckpointEngine, every\n"
        "from perdure.core.errors import ConfigError\n"
        "run, kept = sys.argv[1], {'n': 0}\n"
        "engine = CheckpointEngine(run, save=every(steps=1, budget=1))\n"
        "engine.register(kept=kept)\n"
        "def fork(leave):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        leave()\n"
        "    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "def go_on():\n"
        "    try:\n"
        "        engine.complete_step()\n"
        "    except ConfigError:\n"
        "        sys.exit(8)\n"
        "for step in engine.steps(20):\n"
        "    kept['n'] += step\n"
        "    if step == 10:\n"
        "        assert fork(lambda: sys.exit(7)) == 7\n"
        "        assert fork(go_on) == 8\n"
        "assert kept['n'] == 210\n"
    )
    run = tmp_path / "run"
    subprocess.run([sys.executable, script, run], check=True, timeout=60)
    assert audit_run(run).ok
    state, _ = read_experience(PosixStorage(run))
    assert [one.step for one in state.checkpoints][-1] == 20


def test_what_is_not_its_own_is_left_alone(tmp_path: Path) -> None:
    """Notes, copies and whatever a desktop puts into directories it has shown."""
    run = tmp_path / "run"

    def go(total: int) -> None:
        engine = CheckpointEngine(run, save=every(steps=1), keep=1)
        engine.register(counters={"n": 0}, ring=ReplayRing(4, {"x": ("f4", ())}))
        assert len(list(engine.steps(total, change_total=True))) > 0

    go(2)
    mine = [run / "checkpoints/.DS_Store", run / "checkpoints/notes.txt", run / "quarantine/why.md"]
    mine.append(run / "checkpoints/best/policy.pt")
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    go(4)
    assert all(path.read_text() == "mine" for path in mine)
    assert audit_run(run).ok


@pytest.mark.parametrize("place", ["manifest.json", "state.msgpack", "tensors/array.safetensors"])
@pytest.mark.parametrize("what", ["directory", "link to itself", "link to nothing", "empty"])
def test_what_stands_in_the_place_of_a_file_falls_back(
    tmp_path: Path, place: str, what: str
) -> None:
    def go(total: int) -> CheckpointEngine:
        engine = CheckpointEngine(tmp_path, save=every(steps=2, budget=1), events=ignore_events)
        engine.register(array=np.zeros(9), ring=ReplayRing(4, {"x": ("f4", ())}))
        assert list(engine.steps(total, change_total=True))
        return engine

    go(3)
    path = tmp_path / "checkpoints/step-00000003-1" / place
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "empty":
        path.write_bytes(b"")
    else:
        path.symlink_to(path.name if what == "link to itself" else "nowhere")
    restored = go(5).restored_from
    assert restored is not None
    assert restored.step == 2
    assert [name for name, _ in restored.skipped] == ["step-00000003-1"]
