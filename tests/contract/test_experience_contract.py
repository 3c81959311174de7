"""The store's promises on every storage, in both commit modes, through both doors."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

import experience_records as make
import numpy as np
import pytest

from perdure.core.clock import SystemClock
from perdure.core.errors import LifecycleError
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, LogPosition, SessionId
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.core.storage_api import Storage
from perdure.core.trajectories import PartialDelta, SessionPrefix
from perdure.experience import (
    AgePolicy,
    ExperienceStore,
    FinishedSession,
    GroupState,
    LogOptions,
    RemoteStore,
    RunInfo,
    SamplingRules,
    StoreServer,
    claim_experience,
    create_run,
    decide,
    read_experience,
)
from perdure.storage.memory import MemoryStorage
from perdure.storage.posix import PosixStorage

OpenDoor = Callable[[ExperienceStore], AbstractContextManager[ExperienceStore | RemoteStore]]
MAKERS: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda path: MemoryStorage(),
    "posix": PosixStorage,
}


@pytest.fixture(params=sorted(MAKERS))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    value = MAKERS[request.param](tmp_path)
    create_run(value, RunInfo("5" * 32, 0.0))
    return value


WAYS = {"threaded": (True, "own"), "inline": (False, "own"), "worker": (True, "worker")}
"""Whether a thread commits, and who appends sessions: the own process or a worker."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[bool, str]:
    return WAYS[request.param]


@pytest.fixture
def options(way: tuple[bool, str]) -> LogOptions:
    return LogOptions(linger_s=0.0, threaded=way[0], segment_bytes=8192)


@pytest.fixture
def open_door(way: tuple[bool, str]) -> OpenDoor:
    """Opens the door through which sessions come."""

    @contextlib.contextmanager
    def own(store: ExperienceStore) -> Iterator[ExperienceStore | RemoteStore]:
        yield store

    @contextlib.contextmanager
    def worker(store: ExperienceStore) -> Iterator[ExperienceStore | RemoteStore]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "store"
            server = StoreServer(store, path)
            remote = RemoteStore(path, run_id=store.run.run_id, clock=SystemClock())
            yield remote
            remote.close()
            server.close()

    return worker if way[1] == "worker" else own


def start(storage: Storage, options: LogOptions) -> ExperienceStore:
    claimed = claim_experience(storage, clock=SystemClock(), faults=NoFaults(), options=options)
    return claimed.start(cache_bytes=0)


def run_group(
    store: ExperienceStore,
    door: ExperienceStore | RemoteStore,
    group: int,
    rewards: tuple[float, ...],
) -> None:
    store.submit([make.submitted(group, sessions=len(rewards))])
    for index, reward in enumerate(rewards):
        done = door.sessions_done([FinishedSession(make.trajectory(group, index), reward, {})])
        if door is not store:
            done.result(10)
    store.settle(GroupId(group), GroupOutcome.FINISHED)


def test_a_run_goes_on_where_it_stopped(
    storage: Storage, options: LogOptions, open_door: OpenDoor
) -> None:
    first = start(storage, options)
    with open_door(first) as door:
        for group in range(12):
            run_group(first, door, group, (0.0, 1.0))
    first.take(make.update_id(1), groups=first.oldest_finished(4), config_digest="config")
    first.append(make.step_done(1))
    first.flush(10)
    first.commit(make.checkpointed(1, first.position))
    first.take(make.update_id(2), groups=first.oldest_finished(4), config_digest="config")
    first.close("stopped")
    first.check()

    second = start(storage, options)
    assert make.comparable(second.state, places=False) == make.comparable(first.state, places=False)
    redone = second.state.taken[make.update_id(2)]
    assert redone.groups == (4, 5, 6, 7)
    for number in redone.groups:
        group = second.rewarded_group(GroupId(number))
        for index, found in enumerate(group.trajectories):
            wanted = make.trajectory(number, index)
            np.testing.assert_array_equal(found.response_ids_T, wanted.response_ids_T, strict=True)
            assert not found.logprobs_T.flags.owndata
    second.append(make.step_done(2))
    second.close("finished")
    second.check()
    state, _ = read_experience(storage)
    assert state.last_step == 2
    assert state.counts[GroupState.TRAINED] == 8


def test_a_decision_is_applied_and_paid_for(
    storage: Storage, options: LogOptions, open_door: OpenDoor
) -> None:
    store = start(storage, options)
    with open_door(store) as door:
        run_group(store, door, 0, (1.0, 1.0))
        run_group(store, door, 1, (0.0, 1.0))
    step = GlobalStep(2)
    rules = SamplingRules(AgePolicy.DROP, 2, dynamic_filter=True)
    decision = decide(store.state, global_step=step, rules=rules)
    assert decision.evict == ((GroupId(0), EvictionReason.FILTERED),)
    store.evict(decision.evict, global_step=step)
    store.close("stopped")
    store.check()

    store = start(storage, options)
    decision = decide(store.state, global_step=step, rules=rules)
    assert (decision.evict, decision.refill) == ((), 1)
    store.refill([make.submitted(2, step=2)])
    assert decide(store.state, global_step=step, rules=rules).refill == 0
    store.close("stopped")
    store.check()


S0, S1 = SessionId(GroupId(0), 0), SessionId(GroupId(0), 1)


def logged(store: ExperienceStore, future: Future[LogPosition]) -> LogPosition:
    """Wait until an append is acknowledged."""
    store.commit_all()
    return future.result(10)


def assert_prefix(prefix: SessionPrefix, *pieces: PartialDelta, attempt: int = 0) -> None:
    """The prefix is these pieces, one behind the other."""
    assert prefix.attempt == attempt
    for found, name in (
        (prefix.response_ids_T, "token_ids_N"),
        (prefix.logprobs_T, "logprobs_N"),
        (prefix.loss_mask_T, "loss_mask_N"),
    ):
        wanted = [getattr(piece, name) for piece in pieces] or [found[:0]]
        np.testing.assert_array_equal(found, np.concatenate(wanted), strict=True)
    covered = [(s.version, t) for s in prefix.segments for t in range(s.start, s.end)]
    pieced = [(s.version, t) for p in pieces for s in p.segments for t in range(s.start, s.end)]
    assert covered == pieced


def test_an_unfinished_session_goes_on_from_what_was_acknowledged(
    storage: Storage, options: LogOptions, open_door: OpenDoor
) -> None:
    first = start(storage, options)
    first.submit([make.submitted(0)])
    pieces = [make.delta(0, 0, 0, 3), make.delta(0, 0, 3, 5, version=1), make.delta(0, 0, 5, 9)]
    other = make.delta(0, 1, 0, 2)
    with open_door(first) as door:
        assert_prefix(door.prefix(S0))
        logged(first, door.partials([pieces[0], other]))
        logged(first, door.partials([pieces[1]]))
        assert_prefix(door.prefix(S0), *pieces[:2])
    first.close("stopped")
    first.check()

    second = start(storage, options)
    with open_door(second) as door:
        found = door.prefixes([S1, S0])
        assert_prefix(found[S0], *pieces[:2])
        assert_prefix(found[S1], other)
        logged(second, door.partials([pieces[2]]))
        assert_prefix(door.prefix(S0), *pieces)
        done = FinishedSession(make.trajectory(0, 0), 1.0, {})
        logged(second, door.sessions_done([done]))
        with pytest.raises(LifecycleError):
            door.prefix(S0)
        logged(second, door.partials([pieces[2]]))
    second.close("stopped")
    second.check()


def test_tokens_are_said_again_and_never_replaced(
    storage: Storage, options: LogOptions, open_door: OpenDoor
) -> None:
    store = start(storage, options)
    store.submit([make.submitted(0)])
    piece = make.delta(0, 0, 0, 4)
    with open_door(store) as door:
        logged(store, door.partials([piece]))
        end = logged(store, door.partials([piece.between(1, 3)]))
        assert end == logged(store, door.partials([piece]))
        for wrong in (
            make.delta(0, 0, 5, 6),
            make.delta(0, 0, 4, 6, attempt=1),
            make.delta(0, 0, 2, 6, version=1),
            make.delta(1, 0, 0, 2),
        ):
            with pytest.raises(LifecycleError):
                logged(store, door.partials([wrong]))
        with pytest.raises(ValueError, match="occurs twice"):
            door.partials([make.delta(0, 0, 4, 5), make.delta(0, 0, 5, 6)])
        assert_prefix(door.prefix(S0), piece)
        assert_prefix(door.prefix(S1))
        assert logged(store, door.partials([])) == end
    store.close("stopped")
    store.check()


def test_a_journaled_result_stands(
    storage: Storage, options: LogOptions, open_door: OpenDoor
) -> None:
    store = start(storage, options)
    store.submit([make.submitted(0)])
    one, two = make.tool_result(0, 0), make.tool_result(0, 0, turn=1, call=2, result="say 4")
    with open_door(store) as door:
        assert door.tool_results(S0) == {}
        logged(store, door.tool_result(one))
        end = logged(store, door.tool_result(two))
        assert logged(store, door.tool_result(one)) == end
        with pytest.raises(LifecycleError):
            logged(store, door.tool_result(make.tool_result(0, 0, result="5")))
        with pytest.raises(ValueError, match="characters"):
            door.tool_result(make.tool_result(0, 0, turn=2, result="x" * (2**20 + 1)))
    store.close("stopped")

    store = start(storage, options)
    with open_door(store) as door:
        assert door.tool_results(S0) == {(0, 0): one, (1, 2): two}
        assert door.tool_results(S1) == {}
        with pytest.raises(LifecycleError):
            door.tool_results(SessionId(GroupId(7), 0))
    store.close("stopped")
    store.check()


def test_a_restart_leaves_tokens_and_results_behind(
    storage: Storage, options: LogOptions, open_door: OpenDoor
) -> None:
    store = start(storage, options)
    store.submit([make.submitted(0)])
    with open_door(store) as door:
        logged(store, door.partials([make.delta(0, 0, 0, 3)]))
        logged(store, door.tool_result(make.tool_result(0, 0)))
        with pytest.raises(LifecycleError):
            logged(store, door.restart_session(S0, attempt=2, reason="one is left out"))
        logged(store, door.restart_session(S0, attempt=1, reason="the sandbox is gone"))
        assert door.tool_results(S0) == {}
        assert_prefix(door.prefix(S0), attempt=1)
        again = make.delta(0, 0, 0, 2, attempt=1)
        logged(store, door.partials([again]))
        with pytest.raises(LifecycleError):
            logged(store, door.tool_result(make.tool_result(0, 0, turn=1)))
        assert_prefix(door.prefix(S0), again, attempt=1)
    store.close("stopped")
    store.check()
