"""SIGKILL of ``perdure train`` and ``perdure resume`` on a cluster, at random moments.

What the shell sees: a process that is gone, then one that goes on with the engines the first has
left, and ends with 0.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from async_cases import MODES
from cluster_runs import ClusterRun, settings_of
from drill_tools import KILLED, RECIPE, next_action
from ray_cluster import QUIET, Cluster
from typer.testing import CliRunner

from perdure.cli.main import app

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("ray"), *QUIET]
COMMAND = (sys.executable, "-c", "from perdure.cli.entry import main; main()")
LINES = 16
"""That a life shows until its end, about."""


@dataclass(kw_only=True)
class CliDrill(ClusterRun):
    """One run of the command line."""

    settings: tuple[str, ...]

    def live(self, rng: random.Random) -> None:
        """One more life, killed a moment after it has shown some line; or complete by then."""
        published = self.publications
        status, said = self._one(lines=rng.randint(1, LINES), pause_s=rng.uniform(0, 0.1))
        assert status in (0, KILLED), said
        served = self.publications > published and "run_finished" not in said
        self.note_life(died=status == KILLED, served=served)

    def finish(self) -> None:
        """Let the run come to its end, and prove it."""
        if not self.complete:
            status, said = self._one()
            assert status == 0, said
            assert "run_finished" in said
        audit = CliRunner().invoke(app, ["audit", str(self.run)])
        assert audit.exit_code == 0, audit.output
        self.prove_end()

    def _one(self, *, lines: int | None = None, pause_s: float = 0.0) -> tuple[int, str]:
        """Status and output of one process, killed after so many lines."""
        if next_action(self.run) == "train":
            process = command("train", str(RECIPE), "--run", str(self.run), *self.settings)
        else:
            process = command("resume", str(self.run))
        said = ""
        with process:
            assert process.stdout is not None
            for number, line in enumerate(process.stdout, 1):
                said += line
                if number == lines:
                    time.sleep(pause_s)
                    process.kill()
        return process.returncode, said


def command(*arguments: str) -> subprocess.Popen[str]:
    """Both streams are one."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_the_command_killed_at_a_random_moment(ray_cluster: Cluster, tmp_path: Path) -> None:
    kill_again_and_again(ray_cluster, tmp_path, "separate_async", seed=1, kills=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1002))
@pytest.mark.parametrize("mode", MODES)
def test_soak_of_kills_of_the_command(
    ray_cluster: Cluster, tmp_path: Path, mode: str, seed: int
) -> None:
    killed = kill_again_and_again(ray_cluster, tmp_path, mode, seed=seed, kills=5)
    assert killed["found"] > 0
    print(f"{mode} {seed}: {dict(killed)}")


def kill_again_and_again(
    cluster: Cluster, runs: Path, mode: str, *, seed: int, kills: int
) -> Counter[str]:
    """A run that is complete before all kills are is proven and followed by another."""
    rng, killed, numbers = random.Random(f"command {mode} {seed}"), Counter[str](), count()
    settings = settings_of(mode, seed, cluster)
    while killed["controller"] < kills:
        drill = CliDrill(
            cluster=cluster, run=runs / f"run-{next(numbers)}", killed=killed, settings=settings
        )
        while not drill.complete and killed["controller"] < kills:
            drill.live(rng)
        drill.finish()
    return killed
