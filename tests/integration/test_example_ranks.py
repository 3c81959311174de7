"""The example of several ranks as a person runs it: torchrun, a rank killed, fewer ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perdure.cli import main as cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "ranks.py"
DEADLINE_S = 200.0


def start(run: Path, ranks: int, *, steps: int) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [f"--nproc-per-node={ranks}", str(EXAMPLE), str(run), "--steps", str(steps)]
    return subprocess.Popen(
        [*launcher, *script],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if str(EXAMPLE).encode() in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_is_killed_and_fewer_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launcher = start(run, 2, steps=1_000_000)
    deadline_s = time.monotonic() + DEADLINE_S
    while not list(run.glob("checkpoints/step-*/manifest.json")):
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.kill(ranks_of(launcher)[-1], signal.SIGKILL)
    _, said = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode != 0, said

    show = ["ckpt", "show", str(run), "--digests", "--json"]
    shown = json.loads(CliRunner().invoke(cli.app, show).stdout)
    assert shown["ok"]
    assert shown["ranks"] == 2
    assert shown["components"]["model"]["shards"]["0.weight"]["shape"] == [15, 6]
    assert sorted(shown["digests"]) == ["model", "optimizer", "rng", "rng/rank-1"]
    step = shown["clocks"]["global_step"]

    launcher = start(run, 1, steps=1_000_000)
    while len(list(run.glob("checkpoints/step-*-2/manifest.json"))) == 0:
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=DEADLINE_S)
    assert "saved by 2 ranks and loaded by 1 rank" in said
    assert f"step-{step:08d}-1" in said


def test_its_lines_are_those_of_the_documentation() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "checkpoint.md").read_text()
    assert "examples/ranks.py" in page
    for line in (
        "process_group=dist.group.WORLD",
        'engine.register(model=model, optimizer=optimizer, rng="all")',
        "in engine.steps(total)",
        "fully_shard(model)",
    ):
        assert line in EXAMPLE.read_text()
        assert line in page
