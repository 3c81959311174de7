"""kill -9 of a process whose sessions leave tokens and tool results: nothing acknowledged is lost.

A call whose result was acknowledged is not made again, and the audit proves the rest.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from durable_notes import Durable

from perdure.audit import audit_run

SCRIPT = Path(__file__).with_name("journal_process.py")
DEADLINE_S = 60.0


def one_life(run: Path, wait_s: float) -> list[str]:
    """Start the process, kill it so long after it has looked; what it said in whole lines."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line == "found all\n":
            break
    time.sleep(wait_s)
    process.kill()
    rest, errors = process.communicate(timeout=DEADLINE_S)
    assert "found all\n" in lines, errors
    lines += rest.splitlines(keepends=True)
    return [line.strip() for line in lines if line.endswith("\n")]


COUNTS = [5, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("kills", COUNTS)
def test_what_unfinished_sessions_left_is_found_again(tmp_path: Path, kills: int) -> None:
    chance = random.Random(f"kill the journal {kills}")
    run = tmp_path / "run"
    run.mkdir()
    durable, went_on = Durable(), 0
    calls = Counter[str]()
    for _ in range(kills + 1):
        journaled = set(durable.results)
        lines = one_life(run, chance.uniform(0.1, 0.5))
        found = Durable()
        found.note([line for line in lines if line.startswith("found")])
        durable.check(found)
        went_on += sum(tokens > 0 for _, tokens in found.tokens.values())
        again = Counter((run / "calls.txt").read_text().splitlines())
        assert {name: again[name] for name in journaled} == {n: calls[n] for n in journaled}
        calls = again
        durable.note(lines)
    assert went_on, "no session was cut short: the drill shows nothing"
    assert durable.results, "no result was journaled: the drill shows nothing"
    report = audit_run(run)
    assert report.ok, report.summary_lines()
    assert report.counts["unfinished.partial_tokens"] > 0
    assert report.counts["unfinished.tool_results"] >= len(durable.results)
