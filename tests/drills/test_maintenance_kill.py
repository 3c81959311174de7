"""SIGKILL of ``gc``, ``migrate``, ``push`` and ``pull``: what counted before or what is new, whole.

Each is begun again until it comes through. After every kill the run is looked at, or pulled; in the
end it is as if nothing had happened, and a script goes on with it.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ckpt_cases import names
from ckpt_cases import script as train
from forked import in_a_process
from schema_cases import NAME, migrations
from schema_cases import script as train_schema

from perdure.audit import audit_run
from perdure.checkpoint import CheckpointReader, ReplayRing, choose, verify
from perdure.checkpoint.tier import TierContext, TierOptions, open_objects, pull, push
from perdure.core.clock import SystemClock
from perdure.core.errors import DamagedError, NothingToResumeError
from perdure.core.events import ignore_events
from perdure.core.faults import FaultPlan, FaultRule
from perdure.core.records import Checkpointed
from perdure.experience import read_experience
from perdure.experience.claims import highest_incarnation, read_run
from perdure.runtime.ledger import LogLedger
from perdure.runtime.maintenance import Collecting, Place, collect_run
from perdure.runtime.migrating import migrate_run
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parent.parent / "golden" / "schema-v1"
COUNTS = [8, pytest.param(250, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
STEPS = 6
OPTIONS = TierOptions(piece_bytes=512, parallel=2)
KILLED = -signal.SIGKILL

Action = Callable[[FaultPlan], None]


class Kills:
    """Kills an action at random moments or points until enough are killed.

    Args:
        seed: Of the moments.
        wanted: How many kills.
    """

    def __init__(self, seed: str, wanted: int) -> None:
        self.rng = random.Random(seed)
        self.left = wanted
        self._longest_s = 0.0
        self._reached: list[FaultRule] = []

    def learn(self, action: Action) -> None:
        """Let it come through once, here: which points it passes, and how often."""
        started_s, plan = time.monotonic(), FaultPlan()
        action(plan)
        self._longest_s = time.monotonic() - started_s
        self._reached = [
            FaultRule(point, hit) for point, hits in plan.hits.items() for hit in range(1, hits + 1)
        ]

    def until_done(self, action: Action) -> Iterator[bool]:
        """Kill it, and begin it again, until it comes through; False each time it was killed."""
        status = KILLED
        while status == KILLED:
            if self.left > 0 and self.rng.random() < 0.5:
                plan = FaultPlan([self.rng.choice(self._reached)])
                status = in_a_process(lambda plan=plan: action(plan))
            else:
                after_s = self.rng.uniform(0.0, self._longest_s) if self.left > 0 else None
                status = in_a_process(lambda: action(FaultPlan()), kill_after_s=after_s)
            assert status in (0, KILLED)
            self.left -= status == KILLED
            yield status == 0


def place(run: Path, plan: FaultPlan) -> Place:
    return Place(PosixStorage(run, faults=plan), SystemClock(), plan)


def newest_of(run: Path, *, count: int = 1) -> Checkpointed:
    """The newest checkpoint that counts; it and others, ``count`` in all, are verified."""
    state, _ = read_experience(PosixStorage(run))
    for record in state.checkpoints[-count:]:
        digest = record.manifest_digest
        report = verify(PosixStorage(run), record.directory, manifest_digest=digest)
        assert report.ok, report.reason
    return state.checkpoints[-1]


def files(run: Path, *folders: str) -> dict[str, bytes]:
    found = [path for folder in folders for path in (run / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def ring() -> ReplayRing:
    return ReplayRing(4, {"x": ("f4", ())})


def go_on(run: Path, *, steps: int) -> None:
    """The script; it restores first, and compares what it has restored."""
    replay = ring()
    train(
        run,
        steps=steps,
        keep=9,
        each=lambda step: replay.append({"x": np.full(4, step, np.float32)}),
        replay=replay,
    )
    rows = np.concatenate([block["x"] for block in replay.blocks()])
    assert rows.tolist() == [steps] * 4


def audited(run: Path) -> None:
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six checkpoints, each with rows of its own; a save that was cut off, and its segment."""
    run = tmp_path_factory.mktemp("trained") / "run"
    go_on(run, steps=STEPS)
    (run / "checkpoints/step-00000099-1").mkdir()
    (run / "checkpoints/step-00000099-1/state.msgpack").write_bytes(b"cut off")
    segment = max((run / "segments/replay").glob("*.seg"))
    shutil.copy(segment, segment.with_name(segment.name.replace("-4-1-", "-5-1-")))
    return run


@pytest.mark.parametrize("kills", COUNTS)
def test_gc(trained: Path, tmp_path: Path, kills: int) -> None:
    newest = names(trained)[-2]
    killing = Kills(f"gc {kills}", kills)

    def collect(run: Path, plan: FaultPlan) -> None:
        collect_run(place(run, plan), Collecting(1))

    for number in itertools.count():
        run = tmp_path / str(number)
        shutil.copytree(trained, run)
        if number == 0:
            killing.learn(lambda plan, run=run: collect(run, plan))
        for _ in killing.until_done(lambda plan, run=run: collect(run, plan)):
            assert newest_of(run, count=STEPS).directory == newest
        assert names(run) == [newest]
        assert len(list((run / "segments/replay").iterdir())) == 1
        audited(run)
        go_on(run, steps=STEPS + 1)
        shutil.rmtree(run)
        if killing.left <= 0:
            break


@pytest.mark.parametrize("kills", COUNTS)
def test_migrate(tmp_path: Path, kills: int) -> None:
    killing = Kills(f"migrate {kills}", kills)

    def migrate(run: Path, plan: FaultPlan) -> None:
        migrate_run(place(run, plan), migrations)

    for number in itertools.count():
        run = tmp_path / str(number)
        shutil.copytree(GOLDEN, run)
        if number == 0:
            killing.learn(lambda plan, run=run: migrate(run, plan))
        before = files(GOLDEN, *(f"checkpoints/{name}" for name in names(GOLDEN)), "segments")
        for done in killing.until_done(lambda plan, run=run: migrate(run, plan)):
            newest = newest_of(run, count=9).directory
            assert files(run, "checkpoints", "segments").items() >= before.items()
            if newest != names(GOLDEN)[-1]:
                assert migrated_version(run, newest) == 3
            assert not done or newest != names(GOLDEN)[-1]
        audited(run)
        assert train_schema(run, 3, steps=3).loaded == [3]
        audited(run)
        shutil.rmtree(run)
        if killing.left <= 0:
            break


def migrated_version(run: Path, directory: str) -> int:
    report = verify(PosixStorage(run), directory)
    assert report.manifest is not None
    reader = CheckpointReader(PosixStorage(run), report.manifest)
    np.testing.assert_array_equal(reader.tensors(NAME)["variance"], [1.0, 4.0, 9.0])
    return report.manifest.components[NAME].schema_version


def resumed_from(run: Path) -> int:
    """The step a script would go on from. The log may have come further than the checkpoints."""
    state, _ = read_experience(PosixStorage(run))
    return choose(PosixStorage(run), state.checkpoints, events=ignore_events).name.step


def ship(run: Path, remote: Path, plan: FaultPlan) -> None:
    storage = PosixStorage(run, faults=plan)
    state, _ = read_experience(storage)
    push(
        storage,
        open_objects(f"file://{remote}"),
        ledger=LogLedger(state),
        incarnation=highest_incarnation(storage),
        context=TierContext(SystemClock(), OPTIONS, faults=plan),
    )


def fetch(run: Path, remote: Path, plan: FaultPlan) -> None:
    pull(
        PosixStorage(run, faults=plan),
        open_objects(f"file://{remote}"),
        context=TierContext(SystemClock(), OPTIONS, faults=plan),
    )


@pytest.mark.parametrize("kills", COUNTS)
def test_push(tmp_path: Path, kills: int) -> None:
    """The run grows by two steps between two pushes; whoever pulls gets the old end or the new."""
    killing = Kills(f"push {kills}", kills)
    while killing.left > 0:
        root = tmp_path / str(killing.left)
        push_a_growing_run(killing, root)
        shutil.rmtree(root)


def push_a_growing_run(killing: Kills, root: Path) -> None:
    run, remote, pulled = root / "run", root / "remote", root / "pulled"
    root.mkdir()
    go_on(run, steps=2)
    killing.learn(lambda plan: ship(run, remote, plan))
    before = 2
    for step in (4, 6, 8):
        go_on(run, steps=step)
        for done in killing.until_done(lambda plan: ship(run, remote, plan)):
            fetch(pulled, remote, FaultPlan())
            found = resumed_from(pulled)
            assert (step if done else before) <= found <= step
            before = found
            shutil.rmtree(pulled)
    fetch(pulled, remote, FaultPlan())
    go_on(pulled, steps=9)


@pytest.mark.parametrize("kills", COUNTS)
def test_pull(trained: Path, tmp_path: Path, kills: int) -> None:
    killing = Kills(f"pull {kills}", kills)
    remote = tmp_path / "remote"
    ship(trained, remote, FaultPlan())
    newest = names(trained)[-2]
    for number in itertools.count():
        run = tmp_path / str(number)
        if number == 0:
            killing.learn(lambda plan: fetch(tmp_path / "learned", remote, plan))
        for done in killing.until_done(lambda plan, run=run: fetch(run, remote, plan)):
            if (run / "run.json").exists():
                assert newest_of(run).directory == newest
                continue
            assert not done
            with pytest.raises((NothingToResumeError, DamagedError)):
                read_run(PosixStorage(run))
        assert files(run, f"checkpoints/{newest}") == files(trained, f"checkpoints/{newest}")
        go_on(run, steps=STEPS + 1)
        shutil.rmtree(run)
        if killing.left <= 0:
            break
