"""What the drills share: the fork server, runs to completion under kills, and equality of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from perdure.audit import audit_run, diff_runs

HERE = Path(__file__).parent
RECIPE = HERE / "drill_recipe.yaml"
KILLED = -9
MAX_RESUMES = 60


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process of a run ended."""

    status: int
    hits: dict[str, int]
    log: str


class ForkServer:
    """Runs ``train`` and ``resume`` in forked children that may be killed."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        action: str,
        run: Path,
        *,
        recipe: Path = RECIPE,
        plan: list[dict[str, Any]] | None = None,
        kill_after_s: float | None = None,
        overrides: tuple[str, ...] = (),
    ) -> Ended:
        command = {
            "action": action,
            "run": str(run),
            "recipe": str(recipe),
            "overrides": list(overrides),
            "plan": plan or [],
            "kill_after_s": kill_after_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Ended(answer["status"], answer["hits"], answer["log"])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def resume_to_end(server: ForkServer, run: Path) -> int:
    """Resume without faults until the run is complete; returns how many resumes it took."""
    for count in range(1, MAX_RESUMES + 1):
        ended = server.run(next_action(run), run)
        if ended.status == 0:
            return count
        assert ended.status == KILLED, ended.log
    raise AssertionError(f"not complete after {MAX_RESUMES} resumes")


def next_action(run: Path) -> str:
    """``train`` as long as the run does not exist (killed before anything was durable)."""
    return "resume" if (run / "run.json").exists() else "train"


def assert_same_training(run: Path, reference: Path) -> None:
    """The audit proves the run, and everything but wall-clock fields equals the reference."""
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())
    difference = diff_runs(reference, run)
    assert difference.ok, "\n".join(difference.summary_lines())
    assert final_tensors(run).keys() == final_tensors(reference).keys()
    for name, array in final_tensors(reference).items():
        np.testing.assert_array_equal(final_tensors(run)[name], array, err_msg=name)
    for file in ("steps.jsonl", "evaluations.jsonl"):
        assert metric_rows(run / "metrics" / file) == metric_rows(reference / "metrics" / file)


def final_tensors(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors (model and optimizer) of the newest training checkpoint."""
    newest = max(
        (path for path in (run / "checkpoints").glob("*/manifest.json")),
        key=lambda path: json.loads(path.read_text())["clocks"]["global_step"],
    ).parent
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for file in sorted(newest.rglob("*.safetensors")):
        part = str(file.relative_to(newest))
        tensors |= {f"{part}:{name}": array for name, array in load_file(file).items()}
    assert tensors
    return tensors


def metric_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a curve without wall-clock fields."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "timings_s"} for row in rows]
