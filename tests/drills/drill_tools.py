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
from perdure.experience import read_experience
from perdure.storage import PosixStorage

HERE = Path(__file__).parent
RECIPE = HERE / "drill_recipe.yaml"
KILLED = -9
ANCHORED = (
    "learner.old_logprobs=anchor",
    "trainer.local_updates_per_step=4",
    "learner.importance.mode=truncate",
    "rollout.top_p=0.8",
    "learner.algorithm=reinforce++",
    "learner.kl.placement=reward",
    "learner.entropy_coef=0.01",
    "learner.lr=0.003",
)
"""Four local updates a step against the policy of its start, two mini-batches each. Entropy and
the penalty in the reward make every batch move the weights; truncated sampling makes importance
weights other than 1."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process of a run ended."""

    status: int
    log: str
    when_stopped: Ended | None = None
    """How the process ended that ran while this one was stopped."""

    @property
    def hits(self) -> dict[str, int]:
        """Fault points it passed; only of a process that was not killed."""
        line = next(line for line in reversed(self.log.splitlines()) if line.startswith("HITS "))
        return json.loads(line.removeprefix("HITS "))


class Events:
    """Collects what a run says."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, object]]] = []

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        self.seen.append((name, fields))

    def of(self, name: str) -> list[dict[str, object]]:
        return [fields for seen, fields in self.seen if seen == name]


def command(
    action: str,
    run: Path,
    *,
    plan: list[dict[str, Any]] | None = None,
    kill_after_s: float | None = None,
    overrides: tuple[str, ...] = (),
    take_over: bool = False,
    when_stopped: dict[str, Any] | None = None,
    ranks: dict[str, Any] | None = None,
    torn_down_after_s: float | None = None,
    count_calls: str | None = None,
    kill_engines: list[dict[str, Any]] | None = None,
    engines_under: int | None = None,
) -> dict[str, Any]:
    """A command for ``fork_server.py``."""
    return {
        "action": action,
        "run": str(run),
        "log": f"{run}{'' if ranks is None else ranks['rank']}.child.log",
        "recipe": str(RECIPE),
        "overrides": list(overrides),
        "plan": plan or [],
        "kill_after_s": kill_after_s,
        "take_over": take_over,
        "when_stopped": when_stopped,
        "ranks": ranks,
        "torn_down_after_s": torn_down_after_s,
        "count_calls": count_calls,
        "kill_engines": kill_engines or [],
        "engines_under": engines_under,
    }


def ended_of(answer: dict[str, Any]) -> Ended:
    inner = answer["when_stopped"]
    return Ended(answer["status"], answer["log"], ended_of(inner) if inner else None)


class ForkServer:
    """Runs ``train`` and ``resume`` in forked children that may be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, sys.path)]),
            },
        )

    def run(self, action: str, run: Path, **options: Any) -> Ended:
        (ended,) = self.run_together([command(action, run, **options)])
        return ended

    def run_together(self, commands: list[dict[str, Any]]) -> list[Ended]:
        """Run commands side by side, one process each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(commands) + "\n")
        self._process.stdin.flush()
        answers = json.loads(self._process.stdout.readline())
        return [ended_of(answer) for answer in answers]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def run_to_end(server: ForkServer, run: Path, **options: Any) -> None:
    """Train or resume without faults until the run is complete."""
    ended = server.run(next_action(run), run, **options)
    assert ended.status == 0, ended.log


def next_action(run: Path) -> str:
    """``train`` as long as the run does not exist (killed before anything was durable)."""
    return "resume" if (run / "run.json").exists() else "train"


def assert_same_training(run: Path, reference: Path) -> None:
    """The audit proves the run, and everything but wall-clock fields equals the reference.

    Nothing is left of atomic writes that kills have cut short.
    """
    assert not list(run.rglob(".tmp-*"))
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())
    difference = diff_runs(reference, run)
    assert difference.ok, "\n".join(difference.summary_lines())
    assert_same_results(run, reference)


def assert_same_results(run: Path, reference: Path) -> None:
    """Weights, optimizer, generators and curves are those of the reference, bit for bit."""
    expected, found = final_tensors(reference), final_tensors(run)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    for file in ("steps.jsonl", "evaluations.jsonl"):
        assert metric_rows(run / "metrics" / file) == metric_rows(reference / "metrics" / file)


def final_tensors(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors (model, optimizer, generators) of the last checkpoint of a complete run."""
    # Not by the manifests: an older one may be one that a drill has damaged.
    state, _ = read_experience(PosixStorage(run))
    newest = run / "checkpoints" / state.checkpoints[-1].directory
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
