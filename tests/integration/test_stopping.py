"""SIGTERM and Ctrl-C: an orderly end between two steps, saved; a second signal ends it at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from drill_tools import RECIPE, Events, assert_same_training
from typer.testing import CliRunner

from perdure.cli.main import app
from perdure.config import load_config
from perdure.core.errors import InterruptError, StoppedError
from perdure.core.faults import FaultAction, FaultPlan, FaultPoint, FaultRule, InjectedFault
from perdure.experience import ExperienceState, read_experience
from perdure.storage import FaultyStorage, PosixStorage, StorageFault, StorageFaultKind
from perdure.trainers import launch
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected
from perdure.trainers.stopping import StopRequest

RARE = ("checkpoint.every_steps=100", "checkpoint.warm_start_every_steps=100")
"""No checkpoint is due between the first and the last step."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("stopping") / "reference"
    launch.train(load_config(RunConfig, RECIPE), run)
    return run


def signals_at(
    point: FaultPoint, hit: int, *, signum: int = signal.SIGTERM, count: int = 1
) -> FaultPlan:
    """Signals to this process when a point is passed for the ``hit``-th time."""
    plan = FaultPlan()

    def observe(passed: FaultPoint) -> None:
        if passed is point and plan.hits[point] == hit:
            for _ in range(count):
                os.kill(os.getpid(), signum)

    plan.observers.append(observe)
    return plan


def train(run: Path, plan: FaultPlan, *overrides: str) -> None:
    config = load_config(RunConfig, RECIPE, overrides)
    launch.train(config, run, injected=Injected(faults=plan))


def ends_told(run: Path) -> list[str]:
    """Why incarnations ended before the training, for whoever has not read their output."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["reason"] for event in events if event["event"] == "run_ended"]


def state_of(run: Path) -> ExperienceState:
    return read_experience(PosixStorage(run))[0]


@pytest.mark.parametrize(
    ("point", "hit"),
    [
        (FaultPoint.CLAIM_SEALED, 1),
        (FaultPoint.WARM_START_STEP, 7),
        (FaultPoint.GROUPS_SUBMITTED, 3),
        (FaultPoint.SESSION_FINISHED, 20),
        (FaultPoint.LOG_CONTROL_WRITTEN, 9),
        (FaultPoint.BATCH_TAKEN, 5),
        (FaultPoint.LOCAL_UPDATE_DONE, 5),
        (FaultPoint.STEP_DONE, 3),
        (FaultPoint.WEIGHTS_PUBLISHED, 4),
        (FaultPoint.EVALUATED, 2),
        (FaultPoint.CHECKPOINT_LOGGED, 2),
    ],
)
def test_a_stopped_run_is_saved_where_it_stands(
    tmp_path: Path, reference: Path, point: FaultPoint, hit: int
) -> None:
    """Nothing is redone, and what comes out is what an undisturbed run gives."""
    run = tmp_path / "run"
    with pytest.raises(StoppedError, match=f"SIGTERM.*perdure resume {run}"):
        train(run, signals_at(point, hit), *RARE)
    assert state_of(run).closed
    events = Events()
    launch.resume(run, display=events)
    assert not events.of("redo_started")
    assert_same_training(run, reference)


def test_an_update_that_has_begun_is_finished_and_its_step_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(StoppedError):
        train(run, signals_at(FaultPoint.LOCAL_UPDATE_DONE, 5), *RARE)
    state = state_of(run)
    assert state.last_step == 3
    assert [(c.phase, c.step) for c in state.checkpoints][-1] == ("train", 3)


def test_a_warm_start_is_saved_at_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(StoppedError):
        train(run, signals_at(FaultPoint.WARM_START_STEP, 7), *RARE)
    assert [(c.phase, c.step) for c in state_of(run).checkpoints] == [("warm", 7)]


def test_ctrl_c_says_the_same_with_a_code_of_its_own(tmp_path: Path) -> None:
    run, before = tmp_path / "run", signal.getsignal(signal.SIGINT)
    with pytest.raises(InterruptError, match=f"Ctrl-C.*perdure resume {run}") as caught:
        train(run, signals_at(FaultPoint.STEP_DONE, 2, signum=signal.SIGINT))
    assert caught.value.exit_code == 130
    (reason,) = ends_told(run)
    assert reason == "stopped by Ctrl-C; nothing acknowledged is lost"
    shown = CliRunner().invoke(app, ["status", str(run)]).stdout
    assert f"\nended: {reason}\n" in shown
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_stops_at_once(tmp_path: Path, reference: Path) -> None:
    """In the middle of a step: nothing is finished or saved, and redo makes it up."""
    run = tmp_path / "run"
    plan = signals_at(FaultPoint.LOCAL_UPDATE_DONE, 5, signum=signal.SIGINT, count=2)
    with pytest.raises(InterruptError):
        train(run, plan, *RARE)
    state = state_of(run)
    assert state.last_step == 2
    assert [(c.phase, c.step) for c in state.checkpoints] == [("train", 0)]
    events = Events()
    launch.resume(run, display=events)
    assert [fields["global_step"] for fields in events.of("redone")] == [1, 2]
    assert_same_training(run, reference)


def test_a_redo_is_stopped_between_two_of_its_steps(tmp_path: Path, reference: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(InjectedFault):
        train(run, FaultPlan([FaultRule(FaultPoint.STEP_DONE, 5, FaultAction.RAISE)]), *RARE)
    plan = signals_at(FaultPoint.LOCAL_UPDATE_DONE, 4)
    with pytest.raises(StoppedError):
        launch.resume(run, injected=Injected(faults=plan))
    failed, stopped = ends_told(run)
    assert failed.startswith("InjectedFault: ")
    assert stopped.startswith("stopped by SIGTERM")
    assert [(c.phase, c.step) for c in state_of(run).checkpoints][-1] == ("train", 2)
    events = Events()
    launch.resume(run, display=events)
    assert [fields["global_step"] for fields in events.of("redone")] == [3, 4, 5]
    assert_same_training(run, reference)


def test_a_run_that_is_over_is_not_called_stopped(tmp_path: Path, reference: Path) -> None:
    """The last checkpoint is durable before the run says that it is finished."""
    run = tmp_path / "run"
    config = load_config(RunConfig, RECIPE)
    seen: list[str] = []

    def interrupt_at_the_end(name: str, _: dict[str, object]) -> None:
        seen.append(name)
        if name == "run_finished":
            os.kill(os.getpid(), signal.SIGTERM)

    launch.train(config, run, display=interrupt_at_the_end)
    assert "run_finished" in seen
    assert_same_training(run, reference)


def test_a_disk_that_refuses_the_last_save_does_not_hold_up_the_stop(
    tmp_path: Path, reference: Path
) -> None:
    run = tmp_path / "run"
    full = [StorageFault(StorageFaultKind.NO_SPACE, 1, "checkpoints/step-00000003")]
    storage = FaultyStorage(PosixStorage(run), plan=full)
    events = Events()
    plan = signals_at(FaultPoint.STEP_DONE, 3)
    with pytest.raises(StoppedError):
        launch.train(
            load_config(RunConfig, RECIPE, RARE),
            run,
            display=events,
            injected=Injected(faults=plan, storage=storage),
        )
    assert storage.fired[StorageFaultKind.NO_SPACE] == 1
    assert "no checkpoint at the stop" in str(events.of("warning"))
    launch.resume(run)
    assert_same_training(run, reference)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_in_a_task_that_nobody_waits_for_is_not_reported(
    caplog: pytest.LogCaptureFixture, signum: signal.Signals
) -> None:
    stop = StopRequest()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    async def struck() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signum)

    async def main() -> None:
        stop.attach()
        task = asyncio.get_running_loop().create_task(struck())
        try:
            await asyncio.sleep(60)
        finally:
            loop = asyncio.get_running_loop()
            # As the end of a task does whose failure was not fetched.
            loop.call_exception_handler({"message": "other", "exception": ValueError()})
            loop.call_exception_handler({"message": "mine", "exception": task.exception()})

    with pytest.raises(KeyboardInterrupt), stop.listening():
        asyncio.run(main())
    assert stop.at_once
    assert [record.message for record in caplog.records if record.name == "asyncio"] == ["other"]
    # The loop was torn down while its task still ran; asyncio leaves its own handler behind then.
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_request_before_the_loop_runs_is_kept_and_one_behind_it_harms_nobody() -> None:
    stop = StopRequest()
    passed: list[str] = []

    async def main() -> None:
        stop.attach()
        await asyncio.sleep(0)
        passed.append("went on")

    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
    assert not passed
    late = StopRequest()

    async def over() -> None:
        late.attach()

    with late.listening():
        asyncio.run(over())
        os.kill(os.getpid(), signal.SIGTERM)
    assert late.signum == signal.SIGTERM
