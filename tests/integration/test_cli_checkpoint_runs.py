"""``perdure ckpt gc|pull|push`` through the command line: what they change, and what they leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ckpt_cases import flip, names, perdure, script
from object_servers import BUCKET, S3Server, new_prefix, s3_server

from perdure import CheckpointEngine
from perdure.audit import audit_run
from perdure.checkpoint import ReplayRing
from perdure.checkpoint.tier.pins import Pins
from perdure.core.clock import SystemClock
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.experience import read_experience
from perdure.runtime.maintenance import Collecting, Place, collect_run
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parent.parent / "golden" / "run-v1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    script(tmp_path / "run", steps=4)
    assert len(names(tmp_path / "run")) == 4
    return tmp_path / "run"


def files(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def audited(run: Path) -> None:
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())


def test_gc_keeps_the_newest_and_the_run_goes_on(run: Path) -> None:
    before, all_files = names(run), files(run)
    code, out, _ = perdure("ckpt", "gc", run, "--keep", "2", "--dry-run")
    assert code == 0
    assert files(run) == all_files
    assert [line.split()[0] for line in out.splitlines() if "would go" in line] == before[:2]
    done = json.loads(perdure("ckpt", "gc", run, "--keep", "2", "--json")[1])
    assert (done["kept"], done["collected"]) == (before[2:], before[:2])
    assert done["verified"] == before[-1]
    assert names(run) == before[2:]
    audited(run)
    script(run, steps=5)
    assert perdure("ckpt", "verify", run)[0] == 0
    audited(run)
    assert "nothing to collect" in perdure("ckpt", "gc", run, "--keep", "9")[1]


def test_gc_never_deletes_the_last_that_verifies(run: Path) -> None:
    before = names(run)
    for name in before[1:]:
        flip(run / "checkpoints" / name / "state.msgpack", 3)
    done = json.loads(perdure("ckpt", "gc", run, "--keep", "1", "--json")[1])
    assert done["verified"] == before[0]
    assert names(run) == [before[0], before[-1]]


def test_gc_without_a_whole_checkpoint_changes_nothing(run: Path) -> None:
    for name in names(run):
        flip(run / "checkpoints" / name / "state.msgpack", 3)
    before = files(run)
    code, _, err = perdure("ckpt", "gc", run, "--keep", "1")
    assert code == 5
    assert "nothing is deleted while there is no verified checkpoint" in err
    assert files(run) == before


def test_gc_of_a_live_run_is_refused(run: Path) -> None:
    engine = CheckpointEngine(run)
    engine.register(model=np.zeros(8, np.float32), counter={"seen": 0, "name": ""})
    engine.start(4)
    try:
        assert perdure("ckpt", "gc", run, "--keep", "1")[0] == 3
        assert len(names(run)) == 4
        assert perdure("ckpt", "gc", run, "--keep", "1", "--dry-run")[0] == 0
    finally:
        engine.close()


def test_gc_keeps_what_the_remote_tier_needs(run: Path) -> None:
    first = names(run)[0]
    Pins(PosixStorage(run)).pin([first], notes={})
    done = json.loads(perdure("ckpt", "gc", run, "--keep", "1", "--json")[1])
    assert done["kept"] == [first, names(run)[-1]] == names(run)


def test_gc_collects_cut_off_saves_and_segments_that_nothing_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ring = ReplayRing(100, {"x": ("f4", ())})
    ring.append({"x": np.zeros(10, np.float32)})
    script(run, steps=2, replay=ring)
    segment = next((run / "segments" / "replay").glob("*.seg"))
    unnamed = segment.with_name(segment.name.replace("-10-", "-11-"))
    shutil.copy(segment, unnamed)
    cut_off = run / "checkpoints" / "step-00000009-1"
    cut_off.mkdir()
    (cut_off / "state.msgpack").write_bytes(b"cut off")
    code, out, _ = perdure("ckpt", "gc", run, "--keep", "1")
    assert code == 0
    assert out.count("(left behind)") == 2
    assert (segment.exists(), unnamed.exists(), cut_off.exists()) == (True, False, False)
    assert perdure("ckpt", "verify", run)[0] == 0


def test_gc_of_a_trainers_run_leaves_its_history(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    code, _, err = perdure("ckpt", "gc", run, "--keep", "1")
    assert code == 0, err
    assert names(run) == ["step-00000003-2"]
    audited(run)
    before, _ = read_experience(PosixStorage(GOLDEN))
    after, _ = read_experience(PosixStorage(run))
    assert (after.last_step, after.step_done) == (before.last_step, before.step_done)
    assert after.incarnations[-1].config_digest == before.incarnations[-1].config_digest


@pytest.mark.parametrize(
    "point",
    [
        FaultPoint.CLAIM_SEALED,
        FaultPoint.COLLECT_LOGGED,
        FaultPoint.SEGMENTS_COLLECTED,
        FaultPoint.COLLECTED,
    ],
)
def test_gc_cut_short_is_finished_by_the_next(tmp_path: Path, point: FaultPoint) -> None:
    run = tmp_path / "run"
    ring = ReplayRing(4, {"x": ("f4", ())})
    script(
        run,
        steps=3,
        each=lambda step: ring.append({"x": np.full(4, step, np.float32)}),
        replay=ring,
    )
    newest = names(run)[-1]
    plan = FaultPlan([FaultRule(point, 1, FaultAction.RAISE)])
    with pytest.raises(InjectedFault):
        collect_run(Place(PosixStorage(run), SystemClock(), plan), Collecting(1))
    assert plan.fired
    assert newest in names(run)
    assert perdure("ckpt", "gc", run, "--keep", "1")[0] == 0
    assert names(run) == [newest]
    assert perdure("ckpt", "verify", run)[0] == 0
    audited(run)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{new_prefix()}"


def test_a_pushed_run_is_pulled_and_goes_on(run: Path, url: str, tmp_path: Path) -> None:
    pushed = json.loads(perdure("ckpt", "push", run, url, "--json")[1])
    assert pushed["checkpoint"] == names(run)[-1]
    other = tmp_path / "other"
    code, out, err = perdure("ckpt", "pull", url, other)
    assert code == 0, err
    assert f"{names(run)[-1]}: " in out
    assert perdure("ckpt", "diff", run, other)[0] == 0
    shown = perdure("status", other)[1]
    assert f"holds {names(run)[-1]}\n  all of the log is there" in shown
    script(other, steps=5)
    code, _, err = perdure("ckpt", "push", other, url)
    assert code == 0, err
    script(run, steps=6)
    code, _, err = perdure("ckpt", "push", run, url, "--json")
    assert code == 4, err
    again = json.loads(perdure("ckpt", "pull", url, other, "--json")[1])
    assert again["checkpoint"] == names(other)[-1]


def test_pulling_nothing_and_wrong_addresses_are_sentences(
    run: Path, url: str, tmp_path: Path
) -> None:
    code, _, err = perdure("ckpt", "pull", url, tmp_path / "new")
    assert code == 6, err
    assert not (tmp_path / "new" / "run.json").exists()
    code, _, err = perdure("ckpt", "push", run, "gs://else")
    assert (code, "use s3://bucket/prefix" in err) == (2, True)
    perdure("ckpt", "push", run, url)
    code, _, err = perdure("ckpt", "pull", url, tmp_path / "new", "--checkpoint", "step-7")
    assert (code, "is not in the remote tier" in err) == (2, True)
