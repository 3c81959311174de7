"""The experience log beside SQLite and LMDB: durable trajectories per second, reopening, changes.

    python benchmarks/log.py [--trajectories N] [--rounds R]

Appending: every store gets the same trajectories of about 6 KB, in groups of 8, and counts one as
stored when it would survive a loss of power. Perdure's log checks every session against the life
cycle of its group, and commits groups together by itself. It is handed 128 sessions in a call, the
most that a run hands over at once of those that have finished, and once more each group in a call
of its own. The others have no group commit. They are measured twice: with a transaction for each
group, which is what a program gets that needs each group acknowledged, and with transactions of 64
groups put together by hand. They take turns, each round in a new directory of the same disk; the
best of the rounds counts. The trajectories exist before. While trajectories are appended, to any of
the stores, they are frozen with everything else that is there by then (``gc.freeze``): a run does
not hold 40,000 at a time, and one full collection would look at a quarter of a million objects that
are the benchmark's.

* From a worker: the same, 128 sessions in a call, from another process, which generated the
  trajectories and gets them acknowledged over a socket; CPU time is that of both processes.
* SQLite: WAL, synchronous=FULL, one row per trajectory.
* LMDB: synchronous transactions, one value per trajectory; it has no checksums.

Reopening: claiming a run of about 600 MB whose writer was killed: every byte is hashed, the log is
sealed and folded. Changes: asking which groups changed since the last time, with few and with many
groups ever seen, beside listing all of them.

Times are wall clock of that round; CPU time is of the whole process.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from perdure.core.clock import SystemClock
from perdure.core.experience_records import GroupSettled, Submitted
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, PolicyVersion, SessionId
from perdure.core.record_types import GroupOutcome, StopReason
from perdure.core.trajectories import Segment, Trajectory
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    LogOptions,
    RemoteStore,
    RunInfo,
    StoreServer,
    claim_experience,
    create_run,
)
from perdure.storage import MemoryStorage, PosixStorage

SESSIONS = 8
TOGETHER = 16
"""Groups in a call: as many sessions as ``runtime.session_log`` hands over at most."""
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 640
RUN_ID = "0" * 32

Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True)
class Figure:
    """What storing all trajectories took."""

    seconds: float
    cpu_s: float
    bytes: int

    def rate(self, count: int) -> float:
        return count / self.seconds


def trajectory(group: int, index: int) -> Trajectory:
    """About 6 KB: token ids, log-probabilities and a mask."""
    rng = np.random.default_rng([group, index])
    return Trajectory(
        session=SessionId(GroupId(group), index),
        prompt_ids_P=rng.integers(0, 32_000, PROMPT_TOKENS, np.int32),
        response_ids_T=rng.integers(0, 32_000, RESPONSE_TOKENS, np.int32),
        logprobs_T=-rng.random(RESPONSE_TOKENS, np.float32),
        loss_mask_T=np.ones(RESPONSE_TOKENS, np.uint8),
        segments=(Segment(PolicyVersion(0), 0, RESPONSE_TOKENS),),
        stop_reason=StopReason.LENGTH,
    )


def generated(groups: int) -> Groups:
    """Made beforehand. The garbage collector leaves them alone: no run holds so many at a time."""
    groups_of = [[trajectory(group, i) for i in range(SESSIONS)] for group in range(groups)]
    gc.collect()
    gc.freeze()
    return groups_of


def submitted(group: int) -> Submitted:
    return Submitted(
        GroupId(group),
        GlobalStep(1),
        sessions=SESSIONS,
        prompt_ids=tuple(range(PROMPT_TOKENS)),
        task="benchmark",
        answer="",
        dataset_digest="",
        data_index=group,
    )


def open_store(directory: Path, groups: int) -> ExperienceStore:
    """A new run with so many pending groups."""
    storage = PosixStorage(directory)
    create_run(storage, RunInfo(RUN_ID, 0.0))
    store = claim_experience(storage, clock=SystemClock(), faults=NoFaults()).start()
    store.submit([submitted(group) for group in range(groups)])
    store.flush(60)
    return store


def append_to_perdure(directory: Path, groups: Groups, *, together: int) -> Figure:
    store = open_store(directory, len(groups))

    def append() -> None:
        finish_all(store, groups, together=together)
        store.flush(600)

    figure = measured(append, directory)
    store.close("measured")
    return figure


class Worker:
    """Another process with the same trajectories; it appends them to one store after another."""

    def __init__(self, groups: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", str(groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def append(self, directory: Path, groups: Groups) -> Figure:
        """What it takes from its first append to its last acknowledgement."""
        store = open_store(directory, len(groups))
        with tempfile.TemporaryDirectory() as sockets:
            path = Path(sockets) / "store"
            server = StoreServer(store, path)
            self._ask(str(path))
            answers: list[str] = []
            figure = measured(lambda: answers.append(self._ask("append")), directory)
            seconds, cpu_s = map(float, answers[0].split())
            server.close()
        store.close("measured")
        return Figure(seconds, figure.cpu_s + cpu_s, figure.bytes)

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def work(groups: Groups) -> None:
    """Be a :class:`Worker`: a line with a path, an answer, a line to start, the figures."""
    for path in sys.stdin:
        store = RemoteStore(Path(path.strip()), run_id=RUN_ID, clock=SystemClock())
        print("connected", flush=True)
        sys.stdin.readline()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        finish_all(store, groups, together=TOGETHER)
        store.flush(600)
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        print(seconds, cpu_s, flush=True)
        store.close()


def finish_all(store: ExperienceStore | RemoteStore, groups: Groups, *, together: int) -> None:
    """Log all sessions of the groups, and that these are finished, so many groups in a call."""
    for first in range(0, len(groups), together):
        finish(store, first, groups[first : first + together])


def finish(store: ExperienceStore | RemoteStore, first: int, groups: Groups) -> None:
    """Log all sessions of groups that follow one another, and that the groups are finished."""
    finished = [
        FinishedSession(one, 1.0, {"correct": 1.0}) for sessions in groups for one in sessions
    ]
    numbers = range(first, first + len(groups))
    settled = [GroupSettled(GroupId(number), GroupOutcome.FINISHED) for number in numbers]
    store.sessions_done(finished, settled=settled)


def append_to_sqlite(directory: Path, groups: Groups, *, together: int) -> Figure:
    connection = sqlite3.connect(directory / "log.sqlite", isolation_level=None)
    connection.execute("pragma journal_mode=wal")
    connection.execute("pragma synchronous=full")
    connection.execute("create table trajectory (key text primary key, reward real, value blob)")

    def append() -> None:
        for some in transactions(groups, together):
            connection.execute("begin")
            connection.executemany(
                "insert into trajectory values (?, ?, ?)",
                [(one.session.key(), 1.0, packed(one)) for one in some],
            )
            connection.execute("commit")

    figure = measured(append, directory)
    connection.close()
    return figure


def append_to_lmdb(directory: Path, groups: Groups, *, together: int) -> Figure:
    import lmdb

    environment = lmdb.open(str(directory), map_size=16 * 2**30, sync=True)

    def append() -> None:
        for some in transactions(groups, together):
            with environment.begin(write=True) as transaction:
                for one in some:
                    transaction.put(one.session.key().encode(), packed(one))

    figure = measured(append, directory)
    environment.close()
    return figure


def transactions(groups: Groups, together: int) -> Iterator[list[Trajectory]]:
    for start in range(0, len(groups), together):
        yield [one for group in groups[start : start + together] for one in group]


def packed(one: Trajectory) -> bytes:
    arrays = (one.prompt_ids_P, one.response_ids_T, one.logprobs_T, one.loss_mask_T)
    return b"".join([array.data for array in arrays])


def measured(work: Callable[[], None], directory: Path) -> Figure:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    size = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    return Figure(seconds, cpu_s, size)


def compare_appending(groups: Groups, rounds: int) -> dict[str, Figure]:
    """The best figure of every store; those that are not installed are left out."""
    worker = Worker(len(groups))
    stores: dict[str, Callable[[Path, Groups], Figure]] = {
        "perdure": partial(append_to_perdure, together=TOGETHER),
        "perdure, each group": partial(append_to_perdure, together=1),
        "perdure, from a worker": worker.append,
        "SQLite, each group": partial(append_to_sqlite, together=1),
        "SQLite, 64 groups": partial(append_to_sqlite, together=64),
        "LMDB, each group": partial(append_to_lmdb, together=1),
        "LMDB, 64 groups": partial(append_to_lmdb, together=64),
    }
    best: dict[str, Figure] = {}
    for _ in range(rounds):
        for name, append in stores.items():
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
                try:
                    figure = append(Path(directory), groups)
                except ImportError:
                    continue
            os.sync()
            if name not in best or figure.seconds < best[name].seconds:
                best[name] = figure
    worker.close()
    return best


def reopen(megabytes: int, rounds: int) -> tuple[float, float]:
    """Least seconds to claim a run whose writer was killed, and the MB of its log."""
    best = math.inf
    size = 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
            command = [sys.executable, __file__, "--write-until-killed", name, str(megabytes)]
            killed = subprocess.run(command, check=False)
            assert killed.returncode == -signal.SIGKILL
            size = sum(path.stat().st_size for path in Path(name, "log").iterdir()) / 1e6
            started_s = time.perf_counter()
            claimed = claim_experience(
                PosixStorage(Path(name)), clock=SystemClock(), faults=NoFaults()
            )
            best = min(best, time.perf_counter() - started_s)
            claimed.release()
    return best, size


def write_until_killed(directory: Path, megabytes: int) -> None:
    """Write a log of that size and die."""
    sessions = [trajectory(0, index) for index in range(SESSIONS)]
    count = int(megabytes * 1e6 / sum(one.nbytes for one in sessions))
    store = open_store(directory, count)
    for group in range(count):
        ids = [SessionId(GroupId(group), index) for index in range(SESSIONS)]
        named = [
            dataclasses.replace(one, session=key) for one, key in zip(sessions, ids, strict=True)
        ]
        finish(store, group, [named])
    store.flush(600)
    os.kill(os.getpid(), signal.SIGKILL)


def ask_for_changes(groups: int) -> tuple[float, float]:
    """Milliseconds to ask what changed since, 8 groups having changed, and to list all groups."""
    storage = MemoryStorage()
    create_run(storage, RunInfo("0" * 32, 0.0))
    options = LogOptions(threaded=False)
    claimed = claim_experience(storage, clock=SystemClock(), faults=NoFaults(), options=options)
    store = claimed.start()
    for first in range(0, groups, 1000):
        store.submit([submitted(group) for group in range(first, min(first + 1000, groups))])
        store.flush(60)
    asked: list[float] = []
    cursor = store.changes(0).cursor
    for number in range(100):
        cursor = store.changes(cursor).cursor
        store.start_sessions([SessionId(GroupId(number * 8 + i), 0) for i in range(8)])
        started_s = time.perf_counter()
        changes = store.changes(cursor)
        asked.append(time.perf_counter() - started_s)
        assert len(changes.states) == 8
    started_s = time.perf_counter()
    everything = {group: value.state for group, value in store.state.groups.items()}
    listed_s = time.perf_counter() - started_s
    assert len(everything) == groups
    store.close("measured")
    return 1e3 * statistics.median(asked), 1e3 * listed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=40_000)
    parser.add_argument("--megabytes", type=int, default=600, help="size of the log to reopen")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--write-until-killed", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(generated(arguments.work))
        return
    if arguments.write_until_killed:
        directory, megabytes = arguments.write_until_killed
        write_until_killed(Path(directory), int(megabytes))
    count = arguments.trajectories // SESSIONS * SESSIONS
    groups = generated(count // SESSIONS)
    figures = show_appending(compare_appending(groups, arguments.rounds), count)
    del groups
    gc.unfreeze()
    seconds, megabytes = reopen(arguments.megabytes, arguments.rounds)
    print(f"reopen {megabytes:.0f} MB, hashed, sealed and folded: {seconds:.2f} s")
    figures |= {"reopen_s": seconds, "reopen_mb": megabytes}
    for seen in (1_000, 100_000):
        asked, listed = ask_for_changes(seen)
        print(
            f"what changed since, {seen:,} groups seen: {asked:.3f} ms (list all: {listed:.1f} ms)"
        )
        figures |= {f"changes_ms_{seen}": asked, f"list_ms_{seen}": listed}
    text = json.dumps(figures)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def show_appending(best: dict[str, Figure], count: int) -> dict[str, float]:
    """Print the table; return its figures by name."""
    print(
        f"{'appending 6 KB trajectories':28}{'per s':>10}{'perdure is':>12}{'CPU us':>9}{'MiB':>7}"
    )
    figures: dict[str, float] = {}
    for name, figure in best.items():
        rate, cpu_us = figure.rate(count), 1e6 * figure.cpu_s / count
        # What is acknowledged group by group is compared with the same here.
        own = best["perdure, each group" if name.endswith("each group") else "perdure"].rate(count)
        size = figure.bytes / 2**20
        print(f"{name:28}{rate:10,.0f}{own / rate:11.2f}x{cpu_us:9.1f}{size:7.0f}")
        figures[name] = rate
    for name in {"SQLite", "LMDB"} - {key.split(",")[0] for key in best}:
        print(f"{name:28} not installed")
    return figures


if __name__ == "__main__":
    main()
