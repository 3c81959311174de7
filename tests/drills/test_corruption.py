"""Mutations of every file of a run: each is detected or harmless, none is a silent loss.

The campaign reads in process what a resume would read (log, lineage, checkpoints, curve); a part of
it also runs full resumes.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from drill_tools import KILLED, ForkServer, assert_same_results

from perdure.audit import audit_run
from perdure.checkpoint import choose
from perdure.core.errors import (
    ConfigError,
    DamagedError,
    FutureFormatError,
    LifecycleError,
    NothingToResumeError,
    PerdureError,
)
from perdure.core.events import ignore_events
from perdure.experience import ExperienceState, read_experience
from perdure.runtime.log_reach import check_log_reaches_checkpoints
from perdure.runtime.views import last_step_shown
from perdure.storage import PosixStorage
from perdure.trainers.sanity import check_curve

SLICE = 1000
SOAK = 20_000
RESUMES = 30
CLEAR_STOPS = {
    error.exit_code
    for error in (
        ConfigError,
        DamagedError,
        FutureFormatError,
        LifecycleError,
        NothingToResumeError,
    )
}
PROJECTIONS = ("metrics", "tensorboard", "events.jsonl")
"""Written again from the log by the next incarnation, or for people only."""


@dataclass(frozen=True)
class View:
    """What a resume would go on from."""

    history: str
    checkpoint: str
    cut_bytes: int
    skipped: int


@pytest.fixture(scope="module")
def victim(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three incarnations, killed in the middle of a step.

    It depends on timing whether the checkpoint of the second was durable, hence where the redo of
    the third begins and what the last kill strikes.
    """
    run = tmp_path_factory.mktemp("victim") / "run"
    plans = ({"point": "step_done", "hit": 1}, {"point": "batch_taken", "hit": 3})
    assert server.run("train", run, plan=[plans[0]]).status == KILLED
    assert server.run("resume", run, plan=[plans[1]]).status == KILLED
    last = {"point": "local_update_done", "hit": 5}
    assert server.run("resume", run, plan=[last]).status == KILLED
    return run


def view(run: Path) -> View:
    storage = PosixStorage(run)
    check_log_reaches_checkpoints(storage)
    state, report = read_experience(storage)
    state.check()
    check_curve(state, lambda: last_step_shown(run), events=ignore_events)
    choice = choose(storage, state.checkpoints, events=ignore_events)
    cut = sum(tail.size for tail in report.tails)
    return View(history(state), choice.directory, cut, len(choice.skipped))


def history(state: ExperienceState) -> str:
    """Everything that was acknowledged, as text."""
    return json.dumps(
        [
            [repr(record) for record in state.taken.values()],
            [repr(record) for record in state.step_done.values()],
            [repr(record) for record in state.evaluated.values()],
            [repr(record) for record in state.published.values()],
            [repr(group) for group in state.groups.values()],
            [repr(record) for record in state.checkpoints],
        ]
    )


def mutate(run: Path, rng: random.Random) -> tuple[list[str], str]:
    """Change a file, or two by swapping them; returns every path it touched and what was done."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    other = rng.choice([f for f in files if f != path])
    data, touched = bytearray(path.read_bytes()), [path]
    kind = rng.choice(["flip", "truncate", "delete", "swap", "duplicate", "stale", "zero"])
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "truncate":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "delete":
        path.unlink()
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        touched.append(other)
    elif kind == "duplicate":
        path.write_bytes(data + data)
    elif kind == "stale":
        peers = [f for f in files if f != path and f.suffix == path.suffix]
        path.write_bytes(rng.choice(peers or [other]).read_bytes())
    else:
        start = rng.randrange(len(data))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        path.write_bytes(data)
    return [str(file.relative_to(run)) for file in touched], kind


def judge(run: Path, whole: View) -> str:
    """``detected``, ``harmless`` or ``reported``; anything else is a silent loss."""
    try:
        seen = view(run)
    except PerdureError as error:
        assert error.exit_code in CLEAR_STOPS, repr(error)
        assert len(str(error)) > 20
        return "detected"
    if seen.skipped > whole.skipped:
        return "reported"
    if seen.history == whole.history and seen.checkpoint == whole.checkpoint:
        return "harmless"
    # Bytes above the durable watermark may be a tail: cut, counted and printed.
    assert seen.cut_bytes > whole.cut_bytes, "silent loss"
    return "reported"


def campaign(victim: Path, copy: Path, seeds: range) -> dict[str, int]:
    whole = view(victim)
    verdicts: dict[str, int] = {}
    for seed in seeds:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(victim, copy)
        what = mutate(copy, random.Random(seed))
        try:
            verdict = judge(copy, whole)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what}") from error
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
    return verdicts


@pytest.mark.parametrize("kept", [0, 0.1])
def test_the_log_of_who_only_trained_again_is_missed(
    server: ForkServer, tmp_path: Path, kept: float
) -> None:
    """It has neither generated nor begun a step: the checkpoint it staged tells of it alone."""
    run = tmp_path / "run"
    overrides = ["checkpoint.every_steps=3"]
    plan = [{"point": "step_done", "hit": 3}]
    assert server.run("train", run, overrides=overrides, plan=plan).status == KILLED
    plan = [{"point": "pointer_written", "hit": 1}]
    assert server.run("resume", run, plan=plan).status == KILLED
    (log,) = run.glob("log/control-000002-*")
    log.write_bytes(log.read_bytes()[: int(kept * log.stat().st_size)])
    ended = server.run("resume", run)
    assert ended.status == DamagedError.exit_code, ended.log
    assert log.name in ended.log
    found = [one for one in audit_run(run).findings if one.severity == "damage"]
    assert any("control-000002" in one.where for one in found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_each_mutation_is_detected_or_harmless(victim: Path, tmp_path: Path, part: int) -> None:
    count = SLICE // 4
    verdicts = campaign(victim, tmp_path / "run", range(part * count, (part + 1) * count))
    assert verdicts["detected"] + verdicts["reported"] > count // 4
    assert sum(verdicts.values()) == count


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_soak_of_mutations(victim: Path, tmp_path: Path, part: int) -> None:
    count = SOAK // 20
    campaign(victim, tmp_path / "run", range(10_000 + part * count, 10_000 + (part + 1) * count))


@pytest.mark.parametrize("seed", range(RESUMES))
def test_a_resume_after_a_mutation_goes_on_or_says_why_not(
    server: ForkServer, reference: Path, victim: Path, tmp_path: Path, seed: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(victim, run)
    touched, kind = mutate(run, random.Random(5000 + seed))
    ended = server.run("resume", run)
    if ended.status == 0:
        assert_only_damaged(run, touched, victim)
        assert_same_results(run, reference)
    else:
        assert ended.status in CLEAR_STOPS, f"{kind} {touched}: {ended.log}"
        assert "Traceback" not in ended.log
        if all(path.startswith(PROJECTIONS) for path in touched):
            assert "metrics/" in ended.log, f"{kind} {touched}: {ended.log}"


def assert_only_damaged(run: Path, touched: list[str], victim: Path) -> None:
    """The audit finds at most damage that the resume did not need to read, where it was done.

    With the end of the log goes the word that a checkpoint was deleted: it is missed then.
    """
    explained = list(touched)
    if any(path.startswith("log/control") for path in touched):
        state, _ = read_experience(PosixStorage(victim))
        explained += [f"checkpoints/{directory}/manifest.json" for directory in state.collected]
    for finding in audit_run(run).findings:
        if finding.severity != "note":
            assert finding.severity == "damage", finding.line()
            # A place is a file, or a file and a byte or line in it.
            assert any(f"{finding.where} ".startswith(f"{path} ") for path in explained), (
                f"{touched} was changed, the audit says: {finding.line()}"
            )


def test_damage_elsewhere_is_no_explanation(victim: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(victim, run)
    newest = view(victim).checkpoint
    (run / "checkpoints" / newest / "state.msgpack").write_bytes(b"changed")
    assert_only_damaged(run, ["config.yaml", f"checkpoints/{newest}/state.msgpack"], victim)
    with pytest.raises(AssertionError, match="state.msgpack: "):
        assert_only_damaged(run, ["config.yaml", f"checkpoints/{newest}/state"], victim)
