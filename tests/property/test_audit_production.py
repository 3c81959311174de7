"""What the production writer leaves behind audits clean, through faults, kills and loss of power.

The audit and the writer share no code, so that each checks the other's reading of the format page.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import experience_records as make
import numpy as np
import pytest

from perdure.audit import audit_run
from perdure.core.clock import ManualClock
from perdure.core.errors import DamagedError, StorageError
from perdure.core.experience_records import GroupSettled
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, OptimizerStep, PolicyVersion, SessionId
from perdure.core.record_types import EvictionReason, GroupOutcome, StopReason
from perdure.core.records import Published, StepDone
from perdure.core.storage_api import Storage
from perdure.core.trajectories import PartialDelta, Trajectory, joined_segments
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    LogOptions,
    OpenGroup,
    RunInfo,
    claim_experience,
    create_run,
)
from perdure.experience.opening import ClaimedRun
from perdure.storage import MemoryStorage
from perdure.storage.faulty import FaultyStorage, RandomFaults, StorageFaultKind

LOG = LogOptions(threaded=False, tries=3, segment_bytes=2048)
WRITE_FAULTS = RandomFaults(
    rate=0.02,
    kinds=(
        StorageFaultKind.TORN_WRITE,
        StorageFaultKind.NO_SPACE,
        StorageFaultKind.EIO_WRITE,
        StorageFaultKind.EIO_SYNC,
    ),
)
SEEDS = range(25)
LIVES = 5
SESSIONS = 2


def claim(storage: Storage) -> ClaimedRun:
    return claim_experience(
        storage, clock=ManualClock(), faults=NoFaults(), take_over=True, options=LOG
    )


class Killed(Exception):
    """The process is gone; nothing is closed."""


class Life:
    """One incarnation that trains until it is killed or has done its steps."""

    def __init__(self, storage: Storage, rng: random.Random, versions: Iterator[int]) -> None:
        self._storage = storage
        self._rng = rng
        self._versions = versions

    def live(self) -> None:
        claimed = claim(self._storage)
        try:
            store = self._start(claimed)
            for _ in range(self._rng.randint(1, 3)):
                self._step(store)
            if self._rng.random() < 0.5:
                store.close("done")
        except (Killed, StorageError):
            pass
        finally:
            claimed.release()

    def _start(self, claimed: ClaimedRun) -> ExperienceStore:
        done = list(claimed.state.step_done.values())
        rewind = done and self._rng.random() < 0.3
        base = claimed.state.position_of(self._rng.choice(done)) if rewind else None
        store = claimed.start(base_position=base)
        if not store.state.published:
            self._publish(store, GlobalStep(0), "weights")
        return store

    def _step(self, store: ExperienceStore) -> None:
        step = GlobalStep(store.state.last_step + 1)
        self._maybe_die()
        self._fill(store, step)
        store.flush(1)
        for local in range(len(store.state.updates_of(step)), 2):
            self._maybe_die()
            groups = store.oldest_finished(2)
            store.take(make.update_id(step, local), groups=groups, config_digest="config")
            store.flush(1)
        self._maybe_die()
        policy = f"policy-{step}-{self._rng.random()}"
        store.append(StepDone(step, f"state-{step}", policy, OptimizerStep(step), {}, {}))
        self._publish(store, step, policy)

    def _publish(self, store: ExperienceStore, step: GlobalStep, digest: str) -> None:
        store.append(Published(PolicyVersion(next(self._versions)), digest, step))
        store.flush(1)

    def _fill(self, store: ExperienceStore, step: GlobalStep) -> None:
        """Finish enough groups for the step; some fail and are replaced."""
        table = store.state.table
        while True:
            owed = 2 * (2 - len(store.state.updates_of(step))) - len(table.finished)
            fresh = owed - len(store.open_groups())
            if fresh > 0:
                first = table.next_group
                groups = [make.submitted(first + i, step=step) for i in range(fresh)]
                store.submit(groups)
            if owed <= 0:
                return
            groups = list(store.open_groups())
            count = self._rng.choice([1, len(groups)])
            for first in range(0, len(groups), count):
                self._maybe_die()
                self._finish(store, groups[first : first + count])

    def _finish(self, store: ExperienceStore, groups: Sequence[OpenGroup]) -> None:
        """Settle the groups; their sessions share a record, or each has its own."""
        sessions: list[FinishedSession] = []
        settled: list[GroupSettled] = []
        for group in groups:
            failed = self._rng.random() < 0.1
            missing = group.missing[1:] if failed else group.missing
            sessions += [self._session(store, session) for session in missing]
            outcome = GroupOutcome.FAILED if failed else GroupOutcome.FINISHED
            settled.append(GroupSettled(group.submitted.group, outcome, "broke" if failed else ""))
        self._rng.shuffle(sessions)
        if self._rng.random() < 0.5:
            store.sessions_done(sessions, settled=settled)
        else:
            for session in sessions:
                self._maybe_die()
                store.sessions_done([session])
            for record in settled:
                store.append(record)
        failures = [r.group for r in settled if r.outcome is GroupOutcome.FAILED]
        evicted = [(number, EvictionReason.FAILED) for number in failures]
        store.evict(evicted, global_step=GlobalStep(store.state.last_step + 1))

    def _session(self, store: ExperienceStore, session: SessionId) -> FinishedSession:
        """Go on from what an earlier life left, leave some more, and end."""
        store.start_sessions([session])
        for _ in range(self._rng.choice([0, 0, 1, 3])):
            self._leave(store, session)
        left = store.prefix(session)
        rest = self._next(store, session, generated=True)
        trajectory = Trajectory(
            session=session,
            prompt_ids_P=np.array([1, 2, session.group], np.int32),
            response_ids_T=np.concatenate([left.response_ids_T, rest.token_ids_N]),
            logprobs_T=np.concatenate([left.logprobs_T, rest.logprobs_N]),
            loss_mask_T=np.concatenate([left.loss_mask_T, rest.loss_mask_N]),
            segments=joined_segments([*left.segments, *rest.segments]),
            stop_reason=StopReason.STOP,
        )
        return FinishedSession(trajectory, self._rng.random(), {"right": 1.0})

    def _leave(self, store: ExperienceStore, session: SessionId) -> None:
        """Tokens, the result of a tool call and what it says, or a restart."""
        self._maybe_die()
        attempt, kind = store.prefix(session).attempt, self._rng.random()
        if kind < 0.1:
            store.restart_session(session, attempt=attempt + 1, reason="start again")
        elif kind < 0.4:
            turn = len(store.tool_results(session))
            called = make.tool_result(session.group, session.index, turn=turn, attempt=attempt)
            store.tool_result(called)
            store.partials([self._next(store, session, generated=False)])
        else:
            store.partials([self._next(store, session, generated=True)])
        if self._rng.random() < 0.3:
            store.flush(1)

    def _next(self, store: ExperienceStore, session: SessionId, *, generated: bool) -> PartialDelta:
        left = store.prefix(session)
        start = len(left.response_ids_T)
        piece = make.delta(
            session.group,
            session.index,
            start,
            start + self._rng.randint(1, 9),
            attempt=left.attempt,
            version=store.state.newest_version,
        )
        mask = np.full(len(piece.token_ids_N), int(generated), np.uint8)
        return dataclasses.replace(piece, loss_mask_N=mask)

    def _maybe_die(self) -> None:
        if self._rng.random() < 0.03:
            raise Killed


def assert_proved(storage: MemoryStorage, run: Path) -> dict[str, int]:
    for name, data in storage.files().items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    report = audit_run(run)
    assert report.ok, "\n".join(report.summary_lines())
    return dict(report.counts)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_life_audits_clean(tmp_path: Path, seed: int) -> None:
    rng, versions = random.Random(seed), itertools.count(1)
    disk = MemoryStorage(seed=seed)
    create_run(disk, RunInfo("5" * 32, 0.0))
    for life in range(LIVES):
        storage = FaultyStorage(disk, seed=1000 * seed + life, random=WRITE_FAULTS)
        try:
            Life(storage, rng, versions).live()
        except StorageError:  # struck while it was claimed
            continue
        assert_proved(disk, tmp_path / f"alive-{life}")
        if rng.random() < 0.5:
            disk = disk.crash(seed=rng.randrange(1 << 30))
            assert_proved(disk, tmp_path / f"crashed-{life}")
    Life(disk, rng, versions).live()
    assert_proved(disk, tmp_path / "end")


def test_the_campaign_reaches_what_it_is_for(tmp_path: Path) -> None:
    """Across the seeds steps are trained, decisions voided, groups evicted, sessions cut short."""
    totals = dict.fromkeys(
        (
            "training.global_steps",
            "log.void_decisions",
            "groups.evicted",
            "log.segments",
            "unfinished.partial_tokens",
            "unfinished.tool_results",
            "unfinished.restarts",
        ),
        0,
    )
    for seed in range(6):
        rng, versions = random.Random(seed), itertools.count(1)
        disk = MemoryStorage(seed=seed)
        create_run(disk, RunInfo("5" * 32, 0.0))
        for _ in range(LIVES):
            Life(disk, rng, versions).live()
        counts = assert_proved(disk, tmp_path / str(seed))
        totals = {name: totals[name] + counts[name] for name in totals}
    assert all(totals.values()), totals


def test_production_reader_and_audit_agree_on_damage(tmp_path: Path) -> None:
    disk = MemoryStorage()
    create_run(disk, RunInfo("5" * 32, 0.0))
    versions = itertools.count(1)
    for seed in range(3):
        Life(disk, random.Random(seed), versions).live()
    # Sealed by its own end: of a life that was killed the last batch may be lost unnoticed.
    last = claim(disk)
    last.start().close("done")
    last.release()
    segments = sorted(name for name in disk.files() if name.endswith("-000000.plog"))
    assert segments
    for name in segments:
        broken = disk.crash(seed=0)
        data = bytearray(disk.files()[name])
        data[len(data) // 3] ^= 1
        broken.damage(name, bytes(data))
        run = tmp_path / name.replace("/", "-")
        with pytest.raises(AssertionError):
            assert_proved(broken, run)
        with pytest.raises(DamagedError):
            claim(broken)
