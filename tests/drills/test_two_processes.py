"""Two processes on one run: one goes on, the other is refused or fenced, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from drill_tools import KILLED, ForkServer, assert_same_training, command, run_to_end

from perdure.core.errors import ConfigError, FencedError, RunBusyError

MID_RUN = {"point": "step_done", "hit": 2}


def test_of_two_resumes_one_is_refused(server: ForkServer, reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server.run("train", run, plan=[MID_RUN]).status == KILLED
    ended = server.run_together([command("resume", run), command("resume", run)])
    assert sorted(e.status for e in ended) == [0, RunBusyError.exit_code]
    assert "--take-over" in ended[0].log
    assert_same_training(run, reference)


def test_of_two_trains_one_creates_the_run(
    server: ForkServer, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = server.run_together([command("train", run), command("train", run)])
    assert sum(e.status == 0 for e in ended) == 1
    assert {e.status for e in ended} <= {0, RunBusyError.exit_code, ConfigError.exit_code}
    assert_same_training(run, reference)


@pytest.mark.parametrize("attempt", range(3))
def test_whoever_is_taken_over_is_fenced(
    server: ForkServer, reference: Path, tmp_path: Path, attempt: int
) -> None:
    """Both claim by force: the later claim wins, and the run is complete after one more resume."""
    run = tmp_path / "run"
    assert server.run("train", run, plan=[MID_RUN]).status == KILLED
    both = [command("resume", run, take_over=True) for _ in range(2)]
    ended = server.run_together(both)
    assert {e.status for e in ended} <= {0, FencedError.exit_code}, ended[0].log
    if all(e.status != 0 for e in ended):
        run_to_end(server, run)
    assert_same_training(run, reference)


@pytest.mark.parametrize(
    "point",
    [
        "local_update_done",
        "log_control_written",
        "log_fsynced",
        "manifest_written",
        "collect_logged",
    ],
)
def test_a_stopped_writer_that_wakes_after_a_take_over_changes_nothing(
    server: ForkServer, reference: Path, tmp_path: Path, point: str
) -> None:
    """SIGSTOP in the middle of something; taken over and finished by another; then SIGCONT."""
    run = tmp_path / "run"
    ended = server.run(
        "train",
        run,
        plan=[{"point": point, "hit": 3, "action": "stop"}],
        when_stopped=command("resume", run, take_over=True),
    )
    assert ended.when_stopped is not None
    assert ended.when_stopped.status == 0, ended.when_stopped.log
    assert ended.status == FencedError.exit_code, ended.log
    assert_same_training(run, reference)
