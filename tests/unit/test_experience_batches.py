"""Sessions that are logged together: by the store, and by the runner that finishes them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import experience_records as make
import numpy as np
import pytest

from perdure.core.clock import ManualClock, SystemClock
from perdure.core.errors import LifecycleError, TrainingError
from perdure.core.events import ignore_events
from perdure.core.experience_records import GroupSettled
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, LogPosition, PolicyVersion, SessionId
from perdure.core.record_types import EvictionReason, GroupOutcome, StopReason
from perdure.core.rollout_api import GenerationChunk, GenerationRequest, SamplingParams
from perdure.core.trajectories import Segment
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    GroupState,
    LogOptions,
    RunInfo,
    claim_experience,
    create_run,
    read_experience,
)
from perdure.experience.payloads import PayloadReader
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.sessions import SessionRules, SessionRunner
from perdure.storage.memory import MemoryStorage
from perdure.tasks.api import Prompt, RewardResult
from perdure.tasks.tokenizer import ByteTokenizer

SETTLED = GroupSettled(GroupId(0), GroupOutcome.FINISHED)


@pytest.fixture
def storage() -> MemoryStorage:
    value = MemoryStorage()
    create_run(value, RunInfo("5" * 32, 0.0))
    return value


@pytest.fixture
def store(storage: MemoryStorage) -> Iterator[ExperienceStore]:
    claimed = claim_experience(
        storage,
        clock=ManualClock(),
        faults=NoFaults(),
        options=LogOptions(threaded=False, tries=1),
    )
    store = claimed.start()
    store.submit([make.submitted(group) for group in range(3)])
    yield store
    store.check()


def session(group: int, index: int, reward: float = 0.5) -> FinishedSession:
    return FinishedSession(make.trajectory(group, index), reward, {"right": reward})


def test_sessions_and_what_settles_their_group_are_one_append(
    storage: MemoryStorage, store: ExperienceStore
) -> None:
    future = store.sessions_done(
        [session(0, 0), session(1, 1, 0.25), session(0, 1)], settled=[SETTLED]
    )
    store.flush(1)
    assert future.result(0) == store.position
    assert store.rewarded_group(GroupId(0)).rewards == (0.5, 0.5)
    state, _ = read_experience(storage)
    assert state.table.state_of(GroupId(0)) is GroupState.FINISHED
    assert make.comparable(state) == make.comparable(store.state)
    done = state.groups[GroupId(1)].done[1]
    assert done.batch.record.parts[done.row] == {"right": 0.25}


def test_those_that_counted_before_are_left_out(store: ExperienceStore) -> None:
    first = store.session_done(make.trajectory(0, 0), reward=1.0)
    both = store.sessions_done([session(0, 0), session(0, 1)])
    again = store.sessions_done([session(0, 0)])
    assert both is first is again, "one commit, one future"
    store.flush(1)
    assert store.state.groups[GroupId(0)].done[0].reward == 1.0
    end = store.position
    late = store.sessions_done([session(0, 1)]).result(0)
    assert isinstance(late, LogPosition)
    assert late <= end == store.position


def _wrong_sessions() -> dict[str, FinishedSession]:
    """What the error says of a session → the session."""
    good = session(0, 1)
    given = good.trajectory
    wide = dataclasses.replace(given, response_ids_T=given.response_ids_T.astype(np.int64))
    nothing = {n: getattr(given, n)[:0] for n in ("response_ids_T", "logprobs_T", "loss_mask_T")}
    empty = dataclasses.replace(given, **nothing, segments=())
    return {
        "the reward is nan": session(0, 1, float("nan")),
        "the response is empty": good._replace(trajectory=empty),
        "int64": good._replace(trajectory=wide),
        "float": good._replace(parts={"right": "very"}),  # type: ignore[dict-item]
        "named 1": good._replace(parts={1: 0.5}),  # type: ignore[dict-item]
        "surrogates": good._replace(parts={"\ud800": 0.5}),
        "2 axes": _with(good, prompt_ids_P=given.prompt_ids_P.reshape(1, -1)),
        "is int64, not int": _with(good, segments=(Segment(np.int64(0), 0, 4),)),  # type: ignore[arg-type]
        "is not between": _with(good, segments=(Segment(PolicyVersion(2**63), 0, 4),)),
        "is bool, not int": _with(good, segments=(Segment(PolicyVersion(0), False, 4),)),
        "-1 in g0.s-1": _with(good, session=SessionId(GroupId(0), -1)),
        "stop reason": _with(good, stop_reason="stop"),
    }


def _with(finished: FinishedSession, **changes: Any) -> FinishedSession:
    return finished._replace(trajectory=dataclasses.replace(finished.trajectory, **changes))


@pytest.mark.parametrize(("message", "wrong"), _wrong_sessions().items())
def test_a_session_that_cannot_be_logged_leaves_nothing_behind(
    store: ExperienceStore, message: str, wrong: FinishedSession
) -> None:
    before = make.comparable(store.state)
    with pytest.raises((TrainingError, TypeError, ValueError), match=message):
        store.sessions_done([session(0, 0), wrong])
    assert make.comparable(store.state) == before
    store.sessions_done([session(0, 0), session(0, 1)], settled=[SETTLED])
    store.flush(1)


def _misfits() -> dict[str, dict[str, Any]]:
    """What does not fit together in a trajectory of four tokens → the fields that say so."""
    given = session(0, 1).trajectory
    axes = {"response_ids_T": given.response_ids_T.reshape(-1, 1)}
    bounds = {
        "ends early": [(0, 3)],
        "ends late": [(0, 5)],
        "starts late": [(1, 4)],
        "ends with a fraction": [(0, 4.0)],
        "gap": [(0, 1), (2, 4)],
        "overlap": [(0, 3), (2, 4)],
        "empty": [(0, 0), (0, 4)],
        "several end early": [(0, 1), (1, 3)],
        "several with a fraction": [(0, 2.0), (2, 4)],
    }
    segments: dict[str, dict[str, Any]] = {
        name: {"segments": tuple([Segment(PolicyVersion(0), *one) for one in some])}
        for name, some in bounds.items()
    }
    return segments | {
        "negative version": {"segments": (Segment(PolicyVersion(-1), 0, 4),)},
        "few log-probabilities": {"logprobs_T": given.logprobs_T[:-1]},
        "wide log-probabilities": {"logprobs_T": given.logprobs_T.astype(np.float64)},
        "log-probabilities with 2 axes": {"logprobs_T": given.logprobs_T.reshape(-1, 1)},
        "few flags": {"loss_mask_T": given.loss_mask_T[:-1]},
        "flags that are bool": {"loss_mask_T": given.loss_mask_T.astype(np.bool_)},
        "unsigned prompt": {"prompt_ids_P": given.prompt_ids_P.astype(np.uint32)},
        "2 axes": axes,
    }


@pytest.mark.parametrize("changes", [pytest.param(v, id=k) for k, v in _misfits().items()])
def test_what_does_not_fit_together_is_refused_in_any_company(
    store: ExperienceStore, changes: dict[str, Any]
) -> None:
    wrong = _with(session(0, 1), **changes)
    for company in ([wrong], [session(0, 0), wrong], [wrong, session(0, 0)]):
        with pytest.raises((TypeError, ValueError)):
            store.sessions_done(company)
    assert not store.state.groups[GroupId(0)].done


def test_what_cannot_be_encoded_is_refused_before_it_counts(store: ExperienceStore) -> None:
    before = make.comparable(store.state)
    with pytest.raises(ValueError, match="surrogates"):
        store.settle(GroupId(0), GroupOutcome.FAILED, "\ud800")
    with pytest.raises(ValueError, match="surrogates"):
        store.submit([dataclasses.replace(make.submitted(3), answer="\ud800")])
    assert make.comparable(store.state) == before
    store.settle(GroupId(0), GroupOutcome.FAILED, "broke")
    store.flush(1)


def test_a_group_is_not_settled_twice_with_another_outcome(store: ExperienceStore) -> None:
    store.settle(GroupId(0), GroupOutcome.FAILED)
    store.settle(GroupId(0), GroupOutcome.FAILED)
    with pytest.raises(LifecycleError, match="says something else"):
        store.settle(GroupId(0), GroupOutcome.FINISHED)
    store.evict([(GroupId(0), EvictionReason.FAILED)], global_step=GlobalStep(1))
    with pytest.raises(LifecycleError, match="already evicted"):
        store.state.apply(None, make.session_done(0, 2**40))
    store.flush(1)


def test_a_callback_may_ask_the_store_while_an_append_waits_for_room() -> None:
    storage = MemoryStorage()
    create_run(storage, RunInfo("6" * 32, 0.0))
    options = LogOptions(max_pending_bytes=2000, stall_timeout_s=20.0, linger_s=0.0)
    claimed = claim_experience(storage, clock=SystemClock(), faults=NoFaults(), options=options)
    store = claimed.start()
    asked: list[object] = []
    for group in range(60):
        future = store.submit([make.submitted(group)])
        future.add_done_callback(lambda _: asked.append(store.oldest_finished(1)))
    store.flush(20)
    store.close("end")
    assert asked


def test_numbers_of_any_kind_are_logged_as_numbers(
    storage: MemoryStorage, store: ExperienceStore
) -> None:
    parts = {"right": np.float32(0.5), "count": 3, "sure": True}
    store.sessions_done([FinishedSession(make.trajectory(0, 0), np.float64(1), parts)])
    store.flush(1)
    state, _ = read_experience(storage)
    done = state.groups[GroupId(0)].settled(0)
    assert done.batch.record.parts[done.row] == {"right": 0.5, "count": 3.0, "sure": 1.0}


def test_a_session_of_several_versions_with_tool_output_is_logged_as_it_is(
    storage: MemoryStorage, store: ExperienceStore
) -> None:
    plain = make.trajectory(0, 0)
    tokens = len(plain.response_ids_T)
    segments = (Segment(PolicyVersion(3), 0, 1), Segment(PolicyVersion(2), 1, tokens))
    mixed = dataclasses.replace(
        plain,
        session=SessionId(GroupId(1), 1),
        loss_mask_T=np.arange(tokens, dtype=np.uint8) % 2,
        logprobs_T=np.arange(2 * tokens, dtype=np.float32)[::2],
        response_ids_T=np.arange(tokens, dtype=">i4"),
        segments=segments,
    )
    store.sessions_done([FinishedSession(one, 0.5, {}) for one in (plain, mixed)])
    store.flush(1)
    state, _ = read_experience(storage)
    done = state.groups[GroupId(1)].settled(1)
    record = done.batch.record
    assert record.tokens == (tokens, tokens // 2)
    assert (record.first_versions[done.row], done.last_version) == (2, 3)
    assert done.batch.payload is not None
    reader = PayloadReader(storage)
    read = reader.trajectory(done.batch.payload, row=done.row, session=mixed.session)
    assert read.segments == segments
    for name in ("response_ids_T", "logprobs_T", "loss_mask_T"):
        np.testing.assert_array_equal(getattr(read, name), getattr(mixed, name))


def test_a_record_with_an_illegal_session_does_not_count(
    storage: MemoryStorage, store: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.experience.entries.MAX_SESSIONS", 2)
    some = [session(0, 0), session(0, 1), session(1, 0), session(9, 0), session(2, 0)]
    with pytest.raises(LifecycleError, match="group 9"):
        store.sessions_done(some)
    store.flush(1)
    state, _ = read_experience(storage)
    done = {group: sorted(value.done) for group, value in state.groups.items()}
    assert done == {0: [0, 1], 1: [], 2: []}
    assert make.comparable(state) == make.comparable(store.state)


@pytest.mark.parametrize("limit", ["MAX_SESSIONS", "MAX_BYTES"])
def test_many_sessions_are_portioned_into_records(
    storage: MemoryStorage, store: ExperienceStore, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    most = 2 if limit == "MAX_SESSIONS" else 2 * make.trajectory(0, 0).nbytes
    monkeypatch.setattr(f"perdure.experience.entries.{limit}", most)
    store.sessions_done([session(group, index) for group in range(3) for index in range(2)][:5])
    store.flush(1)
    state, _ = read_experience(storage)
    done = [value.done for value in state.groups.values()]
    rows = [[len(s.batch.record.sessions) for s in sessions.values()] for sessions in done]
    assert rows == [[2, 2], [2, 2], [1]]
    assert make.comparable(state) == make.comparable(store.state)


class _Engine:
    """Answers at once; the requests in ``held`` never."""

    def __init__(self, held: frozenset[str] = frozenset()) -> None:
        self.held = held

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        if request.request_id in self.held:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        yield GenerationChunk(
            token_ids=np.arange(3, dtype=np.int32),
            logprobs=np.zeros(3, np.float32),
            version=PolicyVersion(0),
            stop_reason=StopReason.STOP,
        )


class _Task:
    slow_verifier = False
    tokenizer = ByteTokenizer()

    def verify(self, prompt: Prompt, response_ids: list[int]) -> RewardResult:
        return RewardResult(reward=1.0)


def _runner(store: ExperienceStore, engine: _Engine) -> SessionRunner:
    parts = RuntimeParts(store, _Task(), ManualClock(), NoFaults(), ignore_events)  # type: ignore[arg-type]
    rules = SessionRules(SamplingParams(max_new_tokens=3), seed=1)
    return SessionRunner(engine, parts=parts, rules=rules)  # type: ignore[arg-type]


def test_the_runner_logs_every_session_and_settles_every_group(store: ExperienceStore) -> None:
    asyncio.run(_runner(store, _Engine()).run_groups(store.open_groups()))
    assert list(store.state.table.finished) == [0, 1, 2]


def test_cancelling_the_runner_leaves_what_is_finished_in_the_log(store: ExperienceStore) -> None:
    runner = _runner(store, _Engine(frozenset({"g0.s1", "g1.s0", "g2.s1"})))

    async def run_and_cancel() -> None:
        running = asyncio.create_task(runner.run_groups(store.open_groups()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(store.open_groups()) == 3
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run_and_cancel())
    missing = [session.key() for group in store.open_groups() for session in group.missing]
    assert missing == ["g0.s1", "g1.s0", "g2.s1"]
