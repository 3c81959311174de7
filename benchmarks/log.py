"""The experience log beside SQLite and LMDB: durable trajectories per second, reopening, changes.

    python benchmarks/log.py [--trajectories N] [--rounds R]

Every store gets the same trajectories of about 6 KB, in groups of 8, and counts one as stored when
it would survive a loss of power. Perdure's log is handed one group at a time and commits groups
together by itself. The others have no group commit: they are given transactions of 64 groups, which
is the best for them. They take turns, each round in a new directory of the same disk; the best of
the rounds counts. CPU time is of the whole process.

* SQLite: WAL, synchronous=FULL, one row per trajectory.
* LMDB: synchronous transactions, one value per trajectory; it has no checksums.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perdure.core.clock import SystemClock
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, PolicyVersion, SessionId
from perdure.core.record_types import GroupOutcome, StopReason
from perdure.core.records import GroupSettled, Submitted
from perdure.core.trajectories import Segment, Trajectory
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    RunInfo,
    claim_experience,
    create_run,
)
from perdure.storage import PosixStorage

SESSIONS = 8
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 640
GROUPS_PER_TRANSACTION = 64


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
    create_run(storage, RunInfo("0" * 32, 0.0))
    store = claim_experience(storage, clock=SystemClock(), faults=NoFaults()).start()
    store.submit([submitted(group) for group in range(groups)])
    store.flush(60)
    return store


def append_to_perdure(directory: Path, groups: Sequence[Sequence[Trajectory]]) -> Figure:
    store = open_store(directory, len(groups))

    def append() -> None:
        for number, sessions in enumerate(groups):
            finished = [FinishedSession(t, 1.0, {"correct": 1.0}) for t in sessions]
            settled = GroupSettled(GroupId(number), GroupOutcome.FINISHED)
            store.sessions_done(finished, settled=[settled])
        store.flush(600)

    figure = measured(append, directory)
    store.close("measured")
    return figure


def append_to_sqlite(directory: Path, groups: Sequence[Sequence[Trajectory]]) -> Figure:
    connection = sqlite3.connect(directory / "log.sqlite", isolation_level=None)
    connection.execute("pragma journal_mode=wal")
    connection.execute("pragma synchronous=full")
    connection.execute("create table trajectory (key text primary key, reward real, value blob)")

    def append() -> None:
        for some in transactions(groups):
            connection.execute("begin")
            connection.executemany(
                "insert into trajectory values (?, ?, ?)",
                [(t.session.key(), 1.0, packed(t)) for t in some],
            )
            connection.execute("commit")

    figure = measured(append, directory)
    connection.close()
    return figure


def append_to_lmdb(directory: Path, groups: Sequence[Sequence[Trajectory]]) -> Figure:
    import lmdb

    environment = lmdb.open(str(directory), map_size=16 * 2**30, sync=True)

    def append() -> None:
        for some in transactions(groups):
            with environment.begin(write=True) as transaction:
                for one in some:
                    transaction.put(one.session.key().encode(), packed(one), append=False)

    figure = measured(append, directory)
    environment.close()
    return figure


def transactions(groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    starts = range(0, len(groups), GROUPS_PER_TRANSACTION)
    return [
        [one for group in groups[start : start + GROUPS_PER_TRANSACTION] for one in group]
        for start in starts
    ]


def packed(one: Trajectory) -> bytes:
    arrays = (one.prompt_ids_P, one.response_ids_T, one.logprobs_T, one.loss_mask_T)
    return b"".join([array.data for array in arrays])


def measured(work: Callable[[], None], directory: Path) -> Figure:
    started_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    size = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    return Figure(seconds, cpu_s, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    count = arguments.trajectories // SESSIONS * SESSIONS
    groups = [
        [trajectory(group, index) for index in range(SESSIONS)]
        for group in range(count // SESSIONS)
    ]
    stores: dict[str, Callable[[Path, Sequence[Sequence[Trajectory]]], Figure]] = {
        "perdure": append_to_perdure,
        "SQLite": append_to_sqlite,
        "LMDB": append_to_lmdb,
    }
    best: dict[str, Figure] = {}
    for _ in range(arguments.rounds):
        for name, append in stores.items():
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
                try:
                    figure = append(Path(directory), groups)
                except ImportError:
                    continue
            os.sync()
            if name not in best or figure.seconds < best[name].seconds:
                best[name] = figure
    for name, figure in best.items():
        print(f"{name:10} {figure.rate(count):10,.0f}/s {1e6*figure.cpu_s/count:8.1f} us CPU {figure.bytes/2**20:6.0f} MiB")
    print(json.dumps({name: figure.rate(count) for name, figure in best.items()}))


if __name__ == "__main__":
    main()
