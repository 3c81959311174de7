"""Workers and the process that writes the run are killed; every session is there, once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import experience_records as make
import pytest
from drill_tools import HERE, KILLED
from durable_notes import Durable
from generator_process import SESSIONS, finished
from remote_cases import check_log, group_of
from remote_process import FLUSH_S, GROUPS, RUN_ID

from perdure.audit import audit_run
from perdure.core.clock import SystemClock
from perdure.core.experience_records import GroupSettled
from perdure.core.ids import GroupId, LogPosition, SessionId
from perdure.core.record_types import GroupOutcome
from perdure.experience import FinishedSession, RemoteOptions, RemoteStore
from perdure.experience.remote.frames import number_frame
from perdure.experience.remote.handshake import connect_to, open_wire
from perdure.experience.remote.requests import sessions_frame
from perdure.storage import PosixStorage

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)]),
    "OMP_NUM_THREADS": "1",
}
OPTIONS = RemoteOptions(retry_s=0.01, reconnect_timeout_s=FLUSH_S)


class Processes:
    """Incarnations of a run, one after the other, behind one path."""

    def __init__(self, directory: Path) -> None:
        self.run = directory / "run"
        self.run.mkdir()
        # The path of a socket is short, that of a test's directory need not be.
        self.path = Path(os.path.relpath(directory)) / "s"
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *rules: dict[str, object]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "remote_process.py"),
                str(self.run),
                str(self.path),
                json.dumps(rules),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self._running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        return process

    def worker(self) -> RemoteStore:
        return RemoteStore(self.path, run_id=RUN_ID, clock=SystemClock(), options=OPTIONS)

    def end(self) -> None:
        """Kill what still runs, and let go of it."""
        for process in self._running:
            process.kill()
            process.communicate()

    def finish(
        self, process: subprocess.Popen[str], expected: Sequence[FinishedSession] | None = None
    ) -> None:
        """Let the last incarnation close, and judge the whole run."""
        process.communicate(timeout=FLUSH_S)
        assert process.returncode == 0
        if expected is None:
            expected = [one for group in range(GROUPS) for one in group_of(group)]
        check_log(PosixStorage(self.run), expected)
        report = audit_run(self.run)
        assert report.ok, report.summary_lines()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.chdir(tmp_path)
    value = Processes(tmp_path)
    yield value
    value.end()


def append_all(worker: RemoteStore) -> list[LogPosition]:
    futures = [
        worker.sessions_done(
            group_of(group), settled=[GroupSettled(GroupId(group), GroupOutcome.FINISHED)]
        )
        for group in range(GROUPS)
    ]
    return [future.result(FLUSH_S) for future in futures]


@pytest.mark.parametrize(
    ("point", "hit"),
    [
        ("log_payload_written", 1),
        ("log_payload_fsynced", 1),
        ("log_control_written", 1),
        ("log_fsynced", 1),
        ("log_acknowledged", 1),
        ("log_fsynced", 3),
        ("log_acknowledged", 3),
    ],
)
def test_the_writer_is_killed_between_append_and_reply(
    processes: Processes, point: str, hit: int
) -> None:
    first = processes.start({"point": point, "hit": hit})
    worker = processes.worker()
    early = worker.sessions_done(group_of(0))
    with contextlib.suppress(TimeoutError):
        early.result(0.2 if hit > 1 else 0)
    futures = [worker.sessions_done(group_of(group)) for group in range(1, 3)]
    if hit > 1:
        futures[0].result(FLUSH_S)
        futures.append(worker.sessions_done(group_of(3)))
    assert first.wait(FLUSH_S) == KILLED
    second = processes.start()
    positions = append_all(worker)
    assert {position.incarnation for position in positions} == {2}
    assert all(future.done() for future in (early, *futures))
    worker.close()
    processes.finish(second)


def test_the_writer_is_killed_again_and_again(processes: Processes) -> None:
    """Each incarnation dies at its first or second commit; two workers go through all of them."""
    running = processes.start({"point": "log_fsynced", "hit": 2})
    workers = [processes.worker() for _ in range(2)]
    workers[0].sessions_done(group_of(0)).result(FLUSH_S)
    futures = [workers[group % 2].sessions_done(group_of(group)) for group in range(1, GROUPS // 2)]
    points = ("log_control_written", "log_acknowledged", "log_payload_fsynced", "")
    for kill, point in enumerate(points):
        assert running.wait(FLUSH_S) == KILLED
        running = processes.start(*([{"point": point}] if point else []))
        futures.append(workers[kill % 2].sessions_done(group_of(GROUPS // 2 + kill)))
    append_all(workers[0])
    assert {future.result(FLUSH_S).incarnation for future in futures} >= {5}
    for worker in workers:
        worker.close()
    processes.finish(running)


@pytest.mark.parametrize("point", ["log_payload_fsynced", "log_control_written", "log_fsynced"])
@pytest.mark.parametrize("hit", [1, 2])
def test_the_writer_is_killed_while_sessions_are_unfinished(
    processes: Processes, point: str, hit: int
) -> None:
    first = processes.start({"point": point, "hit": hit})
    worker = processes.worker()
    session = SessionId(GroupId(0), 0)
    result = make.tool_result(0, 0)
    early = worker.partials([make.delta(0, 0, 0, 3)])
    if hit > 1:
        early.result(FLUSH_S)
    futures = [worker.tool_result(result), worker.partials([make.delta(0, 0, 3, 5)])]
    assert first.wait(FLUSH_S) == KILLED
    second = processes.start()
    found = worker.prefix(session)
    assert found.response_ids_T.tolist() == make.delta(0, 0, 0, 5).token_ids_N.tolist()
    assert worker.tool_results(session) == {(0, 0): result}
    assert all(future.done() for future in (early, *futures)), "answers come in order"
    assert futures[-1].result(0).incarnation == 2
    worker.close()
    processes.finish(second, [])


def one_generator(processes: Processes, calls: Path, steps: int) -> tuple[int, list[str]]:
    """Run a generator until it kills itself; its status, and what it said in whole lines."""
    script = [sys.executable, str(HERE / "generator_process.py")]
    ended = subprocess.run(
        [*script, str(processes.path), str(calls), str(steps)],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    lines = ended.stdout.splitlines(keepends=True)
    return ended.returncode, [line.strip() for line in lines if line.endswith("\n")]


KILLS = [4, pytest.param(40, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("kills", KILLS)
def test_a_generator_is_killed_in_the_middle_of_its_sessions(
    processes: Processes, tmp_path: Path, kills: int
) -> None:
    """Another one goes on from the last durable token, and makes no journaled call again."""
    chance = random.Random(f"kill the generator {kills}")
    writer, calls = processes.start(), tmp_path / "calls.txt"
    calls.touch()
    durable, made, went_on = Durable(), Counter[str](), 0
    for life in range(kills + 1):
        steps = chance.randint(5, 240 // kills) if life < kills else 0
        status, lines = one_generator(processes, calls, steps)
        assert status == (KILLED if steps else 0)
        found = Durable()
        found.note([line for line in lines if line.startswith("found")])
        durable.check(found)
        went_on += sum(tokens > 0 for _, tokens in found.tokens.values())
        before, made = made, Counter(calls.read_text().splitlines())
        assert all(made[name] == before[name] for name in durable.results)
        durable.note(lines)
    assert went_on, "no session was cut short: the drill shows nothing"
    assert durable.results
    processes.finish(writer, [finished(session) for session in SESSIONS])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_worker_is_killed_in_the_middle_of_a_frame(processes: Processes, share: float) -> None:
    """What it had sent whole counts, the rest is nobody's, and the other workers go on."""
    process = processes.start()
    code = f"import test_remote_kill as t; t.die_in_the_middle(t.Path('s'), {share})"
    killed = subprocess.run([sys.executable, "-c", code], check=False, env=ENVIRONMENT)
    assert killed.returncode == KILLED
    worker = processes.worker()
    append_all(worker)
    worker.close()
    processes.finish(process)


def die_in_the_middle(path: Path, share: float) -> None:
    """Send one request and a part of another one, then die. Never returns."""
    wire, _ = open_wire(lambda: connect_to(path), path=path, run_id=RUN_ID)
    wire.send(number_frame(sessions_frame(group_of(0), ()), 1), timeout_s=FLUSH_S)
    frame = number_frame(sessions_frame(group_of(1), ()), 2)
    wire.send(frame[: int(len(frame) * share)], timeout_s=FLUSH_S)
    os.kill(os.getpid(), signal.SIGKILL)
