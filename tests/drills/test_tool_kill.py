"""SIGKILL of runs whose sessions call tools: no journaled call is made again, no token replaced."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drill_tools import KILLED, ForkServer, next_action

from perdure.audit import audit_run
from perdure.core.experience_records import Partials, ToolResult
from perdure.experience import read_run
from perdure.experience.claims import highest_incarnation, newest_started
from perdure.experience.reader import read_lineage
from perdure.storage import PosixStorage

OVERRIDES = (
    "deterministic=false",
    "learner.supervised.steps=0",
    "validation.prompts=0",
    "rollout.max_new_tokens=24",
    "rollout.partial_tokens=3",
)
MODES = ("sync", "colocate_async", "separate_async")
POINTS = ("log_payload_fsynced", "log_fsynced", "log_acknowledged", "session_finished")


def records(run: Path) -> list[object]:
    """What the log of the run has, in order; nothing before it was claimed."""
    storage = PosixStorage(run)
    if not storage.exists("run.json") or not (newest := highest_incarnation(storage)):
        return []
    head = newest_started(storage, run_id=read_run(storage).run_id, below=newest + 1)
    return [record for _, record in read_lineage(storage, head).records] if head else []


def calls_made(counts: Path) -> list[str]:
    return counts.read_text().splitlines() if counts.exists() else []


def kill_at_random(server: ForkServer, directory: Path, mode: str, *, seed: int, kills: int) -> int:
    """Kill a run so often, then let it end; returns how many calls were in the journal then."""
    rng = random.Random(seed)
    run, counts = directory / "run", directory / "counts"
    options = {"overrides": (f"mode={mode}", *OVERRIDES), "count_calls": str(counts)}
    seen = 0
    for _ in range(kills):
        if rng.random() < 0.3:
            strike = {"kill_after_s": rng.uniform(0.05, 0.6)}
        else:
            strike = {"plan": [{"point": rng.choice(POINTS), "hit": rng.randint(2, 60)}]}
        ended = server.run(next_action(run), run, **strike, **options)
        assert ended.status in (0, KILLED), ended.log
        journaled = {
            f"{r.session.key()} {r.attempt} {r.turn} {r.call}"
            for r in records(run)
            if isinstance(r, ToolResult)
        }
        _check_calls(counts, seen)
        seen = len(calls_made(counts))
        (directory / "journaled").write_text("\n".join(sorted(journaled)))
    ended = server.run(next_action(run), run, **options)
    assert ended.status == 0, ended.log
    _check_calls(counts, seen)
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())
    return sum(isinstance(record, Partials | ToolResult) for record in records(run))


def _check_calls(counts: Path, seen: int) -> None:
    """Assert that what was in the journal when the process began was not called in it."""
    journal = counts.with_name("journaled")
    journaled = set(journal.read_text().splitlines()) if journal.exists() else set()
    assert journaled.isdisjoint(calls_made(counts)[seen:])


@pytest.mark.parametrize("mode", MODES)
def test_no_journaled_call_is_made_again(server: ForkServer, tmp_path: Path, mode: str) -> None:
    assert kill_at_random(server, tmp_path, mode, seed=5, kills=6) > 20


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(100, 112))
def test_soak_of_journaled_calls(server: ForkServer, tmp_path: Path, mode: str, seed: int) -> None:
    kill_at_random(server, tmp_path, mode, seed=seed, kills=8)
