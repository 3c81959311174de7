"""separate_async with engines in processes of their own: real kills, stops, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drill_tools import RECIPE, Events
from engine_kills import engines_of, is_engine

from perdure.audit import audit_run
from perdure.config import load_config
from perdure.core.errors import StoppedError
from perdure.experience import read_experience
from perdure.storage import PosixStorage
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

OVERRIDES = (
    "mode=separate_async",
    "rollout.engines=2",
    "learner.supervised.steps=0",
    "rollout.process.heartbeat_s=0.2",
    "rollout.process.silence_timeout_s=3",
)
PLACE = "perdure.publish.directory.SHARED_MEMORY"
pytestmark = pytest.mark.timeout(300)

CONTROLLER = """
import sys
from pathlib import Path
import perdure.publish.directory
from perdure.config import load_config
from perdure.core.errors import StoppedError
from perdure.trainers import launch
from perdure.trainers.config import RunConfig

perdure.publish.directory.SHARED_MEMORY = Path(sys.argv[1])
config = load_config(RunConfig, Path(sys.argv[2]), sys.argv[4:])
launch.train(config, Path(sys.argv[3]), display=lambda name, fields: print(name, flush=True))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where published weights lie."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setattr(PLACE, place)
    return place


def train(run: Path, *overrides: str, on_step: Callable[[], None] = lambda: None) -> Events:
    """Train to the end; ``on_step`` is called after every global step. The audit holds."""
    events = Events()

    def display(name: str, fields: dict[str, object]) -> None:
        events(name, fields)
        if name == "step":
            on_step()

    config = load_config(RunConfig, RECIPE, [*OVERRIDES, *overrides])
    launch.train(config, run, display=display)
    report = audit_run(run)
    assert report.ok, report.summary_lines()
    return events


def test_engines_serve_in_processes_of_their_own_and_leave_nothing(
    tmp_path: Path, place: Path
) -> None:
    seen: set[int] = set()
    events = train(tmp_path / "run", on_step=lambda: seen.update(engines_of(os.getpid())))
    assert len(seen) == 2
    assert engines_of(os.getpid()) == []
    assert list(place.iterdir()) == []
    assert not events.of("engine_lost")
    assert not events.of("engine_quarantined")
    assert len(events.of("published")) == 7


def test_the_learner_generates_before_there_is_a_first_batch(tmp_path: Path, place: Path) -> None:
    events = train(tmp_path / "run", "rollout.slots=4")
    (decision,) = events.of("spillover")
    assert decision["lend"]
    assert decision["reason"] == "the first batch"
    (returned,) = events.of("learner_returned")
    assert returned["global_step"] == 1


def test_spillover_says_what_it_decides_and_why(tmp_path: Path, place: Path) -> None:
    events = train(
        tmp_path / "run", "rollout.slots=2", "rollout.engines=1", "rollout.spillover=true"
    )
    decisions = events.of("spillover")
    assert len(decisions) > 1
    for decision in decisions:
        inputs = {"missing", "queued", "scaling", "seconds_per_group", "switch_s"}
        assert inputs | {"saves_s", "target", "ratio", "reason"} <= decision.keys()
    assert len(events.of("learner_returned")) == sum(bool(d["lend"]) for d in decisions)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_engine_is_replaced_and_the_run_goes_on(
    tmp_path: Path, place: Path, number: signal.Signals
) -> None:
    run, events = tmp_path / "run", Events()
    struck: list[int] = []

    def display(name: str, fields: dict[str, object]) -> None:
        events(name, fields)
        if name == "step" and fields["global_step"] == 2:
            struck.extend(engines_of(os.getpid())[:1])
            os.kill(struck[0], number)
        elif name == "engine_replaced":
            os.kill(os.getpid(), signal.SIGTERM)

    overrides = ["trainer.total_steps=5000", "validation.prompts=0", "checkpoint.every_steps=1000"]
    config = load_config(RunConfig, RECIPE, [*OVERRIDES, *overrides])
    with pytest.raises(StoppedError):
        launch.train(config, run, display=display)
    (lost,) = events.of("engine_lost")
    reason = "died" if number is signal.SIGKILL else "gives no sign of life"
    assert f"{struck[0]} {reason}" in str(lost["reason"])
    (replaced,) = events.of("engine_replaced")
    assert replaced["engine"] == lost["engine"]
    assert engines_of(os.getpid()) == []
    assert list(place.iterdir()) == []
    assert audit_run(run).ok


def test_no_process_outlives_a_killed_controller(tmp_path: Path, place: Path) -> None:
    run = tmp_path / "run"
    arguments = [str(place), str(RECIPE), str(run), *OVERRIDES, "trainer.total_steps=30"]
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    with controller.stdout as lines:
        assert any(line.strip() == "step" for line in lines)
        engines = engines_of(controller.pid)
        assert len(engines) == 2
        controller.kill()
        controller.wait()
    deadline_s = time.monotonic() + 10
    while any(is_engine(pid) for pid in engines):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert len(list(place.iterdir())) == 2
    launch.resume(run)
    assert list(place.iterdir()) == []
    assert audit_run(run).ok
    state, _ = read_experience(PosixStorage(run))
    assert state.last_step == 30
