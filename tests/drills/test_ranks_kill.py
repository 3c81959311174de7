"""SIGKILL of one rank of several, at points and at random moments, then a start with other ranks.

The rest of the job is torn down as a launcher does. The script checks at every start that each rank
holds exactly the step that it says it goes on from; here, that what is committed is one step's.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drill_tools import KILLED, Ended, ForkServer, command
from rank_cases import newest, wholes

from perdure.audit import audit_run
from perdure.checkpoint import CheckpointReader
from perdure.core.errors import StoppedError, TrainingError
from perdure.core.faults import FaultPoint
from perdure.experience import read_experience
from perdure.storage import PosixStorage

SIZES = (4, 2, 3, 1, 4, 3)
ANYWHERE = (
    FaultPoint.CHECKPOINT_STAGED,
    FaultPoint.CHECKPOINT_FILE_WRITTEN,
    FaultPoint.CHECKPOINT_FILES_DURABLE,
)
ON_THE_FIRST = (
    FaultPoint.MANIFEST_WRITTEN,
    FaultPoint.MANIFEST_RENAMED,
    FaultPoint.LOG_FSYNCED,
    FaultPoint.CHECKPOINT_LOGGED,
    FaultPoint.POINTER_WRITTEN,
    FaultPoint.COLLECT_LOGGED,
    FaultPoint.COLLECTED,
    FaultPoint.RESTORE_MODEL,
    FaultPoint.CLAIM_LINKED,
)
_jobs = itertools.count()


def job(
    run: Path, size: int, *, victim: int, wait_s: float = 20.0, **options: Any
) -> list[dict[str, Any]]:
    """Commands of all ranks; the options are the victim's."""
    store = f"{run}.store-{next(_jobs)}"
    torn_down_after_s = options.pop("torn_down_after_s", 0.0)
    return [
        command(
            "arrays",
            run,
            ranks={"rank": rank, "size": size, "store": store, "wait_s": wait_s},
            torn_down_after_s=torn_down_after_s,
            **(options if rank == victim else {}),
        )
        for rank in range(size)
    ]


def kills(rng: random.Random) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Ranks, victim, and how it dies, again and again."""
    for size in itertools.cycle(SIZES):
        victim = rng.randrange(size)
        if rng.random() < 0.5:
            yield size, victim, {"kill_after_s": rng.uniform(0.05, 0.4)}
            continue
        points = ANYWHERE if victim else (*ANYWHERE, *ON_THE_FIRST)
        plan = [{"point": rng.choice(points).value, "hit": rng.randint(1, 4)}]
        # A point that is not passed again is no kill: the moment is the deadline.
        yield size, victim, {"plan": plan, "kill_after_s": 0.8}


def kill_in_turn(server: ForkServer, run: Path, *, seed: int, count: int) -> None:
    """Kill, look at what is committed, start again with other ranks, and so on."""
    rng = random.Random(seed)
    step = 0
    for size, victim, how in itertools.islice(kills(rng), count):
        torn_down_after_s = rng.choice((0.0, 0.02, 0.1))
        ended = server.run_together(
            job(run, size, victim=victim, torn_down_after_s=torn_down_after_s, **how)
        )
        assert ended[victim].status == KILLED, ended[victim].log
        assert all(one.status == KILLED for one in ended), [one.log for one in ended]
        before, step = step, committed_step(run)
        assert step >= before, (size, victim, how)
    assert audit_run(run).ok, "\n".join(audit_run(run).summary_lines())


def committed_step(run: Path) -> int:
    """The step of the newest committed checkpoint, all of whose parts are of that step."""
    storage = PosixStorage(run)
    if not (run / "run.json").exists() or not has_checkpoint(storage):
        return 0
    reader = newest(storage)
    step = reader.manifest.name.step
    assert reader.values()["counters"] == {"data": {"steps": step}}
    found = reader.tensors("model")
    for name, expected in wholes(step).items():
        np.testing.assert_array_equal(found[name], expected)
    return step


def has_checkpoint(storage: PosixStorage) -> bool:
    return bool(read_experience(storage)[0].checkpoints)


def test_twenty_kills_of_a_random_rank(server: ForkServer, tmp_path: Path) -> None:
    kill_in_turn(server, tmp_path / "run", seed=0, count=24)
    assert committed_step(tmp_path / "run") > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 13))
def test_soak_of_kills_of_a_random_rank(server: ForkServer, tmp_path: Path, seed: int) -> None:
    kill_in_turn(server, tmp_path / "run", seed=seed, count=50)


@pytest.mark.parametrize("victim", [0, 2])
def test_the_other_ranks_of_one_that_died_end_by_themselves(
    server: ForkServer, tmp_path: Path, victim: int
) -> None:
    run = tmp_path / "run"
    plan = [{"point": FaultPoint.CHECKPOINT_FILES_DURABLE.value, "hit": 2}]
    started_s = time.monotonic()
    ended = server.run_together(
        job(run, 3, victim=victim, wait_s=1.0, plan=plan, torn_down_after_s=60.0)
    )
    assert time.monotonic() - started_s < 30
    assert ended[victim].status == KILLED
    for rank, one in enumerate(ended):
        if rank != victim:
            assert one.status in (TrainingError.exit_code, StoppedError.exit_code), one.log
            assert f"rank {victim}" in one.log
    # The victim died with its files durable and its word not given.
    assert committed_step(run) == 3


def spread(
    server: ForkServer, run: Path, size: int, steps: int, *, idle: bool = False, **kill: Any
) -> Sequence[Ended]:
    store = f"{run}.store-{next(_jobs)}"
    victim = kill.pop("victim", None)
    ranks = {"size": size, "store": store, "steps": steps, "idle": idle}
    commands = [
        command(
            "spread_model",
            run,
            ranks={"rank": rank, **ranks},
            torn_down_after_s=0.0,
            **(kill if rank == victim else {}),
        )
        for rank in range(size)
    ]
    return server.run_together(commands)


def test_fully_sharded_training_goes_on_with_other_numbers_of_ranks(
    server: ForkServer, tmp_path: Path
) -> None:
    """1 → 2 → 4 → 1 on gloo: killed, loaded elsewhere, stored there with the same digests."""
    run = tmp_path / "run"
    steps = 0
    for size, next_size in itertools.pairwise((1, 2, 4, 1)):
        steps += 6
        plan = [{"point": FaultPoint.CHECKPOINT_LOGGED.value}]
        assert spread(server, run, size, steps + 9, victim=0, plan=plan)[0].status == KILLED
        assert all(one.status == 0 for one in spread(server, run, size, steps))
        before = newest(PosixStorage(run))
        # The same state, stored by other ranks.
        steps += 1
        ended = spread(server, run, next_size, steps, idle=True)
        assert all(one.status == 0 for one in ended), [one.log for one in ended]
        after = newest(PosixStorage(run))
        assert (before.manifest.ranks, after.manifest.ranks) == (size, next_size)
        assert digests(before) == digests(after)


def digests(reader: CheckpointReader) -> dict[str, str]:
    return {name: reader.digest(name) for name in ("model", "optimizer")}
