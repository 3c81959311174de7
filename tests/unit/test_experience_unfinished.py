"""What sessions that are not done leave in the log, and what the next incarnation finds of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import experience_records as make
import numpy as np
import pytest

from perdure.core.clock import ManualClock
from perdure.core.errors import DamagedError, LifecycleError
from perdure.core.experience_records import ToolResult
from perdure.core.faults import NoFaults
from perdure.core.ids import GroupId, LogPosition, PolicyVersion, SessionId
from perdure.core.record_types import GroupOutcome
from perdure.core.trajectories import PartialDelta, Segment, SessionPrefix
from perdure.experience import (
    Begun,
    ExperienceState,
    ExperienceStore,
    LogOptions,
    RunInfo,
    claim_experience,
    create_run,
    entries,
)
from perdure.experience.continuation import MAX_RESULT_CHARACTERS
from perdure.experience.partials import read_tokens
from perdure.experience.payloads import PayloadReader
from perdure.experience.unfinished import PartialBatch
from perdure.storage.memory import MemoryStorage

S00 = SessionId(GroupId(0), 0)
S11 = SessionId(GroupId(1), 1)
PAYLOAD = "log/payload-000001-000000.plog"


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage(0)
    create_run(storage, RunInfo("5" * 32, 0.0))
    return storage


def start(storage: MemoryStorage, base: LogPosition | None = None) -> ExperienceStore:
    options = LogOptions(threaded=False)
    claimed = claim_experience(storage, clock=ManualClock(), faults=NoFaults(), options=options)
    return claimed.start(base_position=base)


@pytest.fixture
def store(storage: MemoryStorage) -> ExperienceStore:
    store = start(storage)
    store.submit([make.submitted(0), make.submitted(1)])
    return store


def reopened(store: ExperienceStore, storage: MemoryStorage) -> ExperienceStore:
    store.flush(1)
    store.check()
    return start(storage.process_kill())


def assert_prefix(prefix: SessionPrefix, *pieces: PartialDelta) -> None:
    """The prefix is these pieces, one after another."""
    for name, own in (
        ("response_ids_T", "token_ids_N"),
        ("logprobs_T", "logprobs_N"),
        ("loss_mask_T", "loss_mask_N"),
    ):
        expected = [value for piece in pieces for value in getattr(piece, own).tolist()]
        assert getattr(prefix, name).tolist() == expected
    assert (prefix.response_ids_T.dtype, prefix.logprobs_T.dtype) == (np.int32, np.float32)
    assert prefix.loss_mask_T.dtype == np.uint8


def changed(delta: PartialDelta, **fields: object) -> PartialDelta:
    return dataclasses.replace(delta, **fields)


def test_a_prefix_is_joined_from_what_is_on_its_way_and_from_the_log(
    store: ExperienceStore, storage: MemoryStorage
) -> None:
    pieces = [make.delta(0, 0, 0, 5), make.delta(0, 0, 5, 6), make.delta(0, 0, 6, 9, version=3)]
    other = make.delta(1, 1, 0, 4, version=2)
    store.partials([pieces[0], other])
    assert_prefix(store.prefix(S00), pieces[0])
    store.flush(1)
    store.partials([pieces[1]])
    assert_prefix(store.prefix(S00), *pieces[:2])
    store.flush(1)
    store.partials([pieces[2]])
    store = reopened(store, storage)
    found = store.prefixes([S11, S00])
    assert_prefix(found[S00], *pieces)
    assert_prefix(found[S11], other)
    versions = [(s.version, s.start, s.end) for s in found[S00].segments]
    assert versions == [(0, 0, 6), (3, 6, 9)]
    assert store.state.next_version == 4


def test_nothing_logged_is_an_empty_prefix(store: ExperienceStore) -> None:
    prefix = store.prefix(S00)
    assert_prefix(prefix)
    assert (prefix.attempt, prefix.segments) == (0, ())


def test_open_groups_say_where_to_go_on(store: ExperienceStore, storage: MemoryStorage) -> None:
    store.partials([make.delta(0, 0, 0, 5, version=2), make.delta(1, 1, 0, 3)])
    store.partials([make.delta(0, 0, 5, 7, version=1)])
    store.tool_result(make.tool_result(0, 0, turn=1, call=2))
    store.restart_session(S11, attempt=1, reason="the sandbox is gone")
    for one in (store, reopened(store, storage)):
        first, second = one.open_groups()
        versions = (PolicyVersion(1), PolicyVersion(2))
        assert first.begun == {S00: Begun(0, 7, versions, ((1, 2),))}
        assert second.begun == {S11: Begun(1, 0, None, ())}
        assert first.missing == (S00, SessionId(GroupId(0), 1))


def test_many_sessions_share_a_record_up_to_its_limits(
    store: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "MAX_SESSIONS", 3)
    store.submit([make.submitted(2, sessions=5)])
    store.flush(1)
    before = store.position.offset
    pieces = [make.delta(2, index, 0, 40) for index in range(5)]
    store.partials(pieces)
    groups = store.state.groups[GroupId(2)].unfinished
    rows = [len(groups[index].parts[0].batch.record.sessions) for index in range(5)]
    assert rows == [3, 3, 3, 2, 2]
    store.flush(1)
    assert store.position.offset > before
    found = store.prefixes([piece.session for piece in pieces])
    for piece in pieces:
        assert_prefix(found[piece.session], piece)


def test_what_the_log_has_may_be_said_again_in_other_pieces(
    store: ExperienceStore, storage: MemoryStorage
) -> None:
    store.partials([make.delta(0, 0, 0, 6)])
    store = reopened(store, storage)
    position = store.position
    store.partials([make.delta(0, 0, 0, 6)])
    store.partials([make.delta(0, 0, 2, 4)])
    store.flush(1)
    assert store.position == position
    store.partials([make.delta(0, 0, 4, 9)])
    assert_prefix(store.prefix(S00), make.delta(0, 0, 0, 9))
    assert [part.start for part in store.state.groups[GroupId(0)].unfinished[0].parts] == [0, 6]
    store.check()


@pytest.mark.parametrize(
    "other",
    [
        changed(make.delta(0, 0, 2, 8), token_ids_N=np.array([2, 3, 4, 9, 6, 7], np.int32)),
        changed(make.delta(0, 0, 2, 8), logprobs_N=np.zeros(6, np.float32)),
        changed(make.delta(0, 0, 2, 8), loss_mask_N=np.array([1, 1, 1, 0, 1, 1], np.uint8)),
        make.delta(0, 0, 2, 8, version=1),
        changed(
            make.delta(0, 0, 2, 8),
            segments=(Segment(PolicyVersion(0), 2, 5), Segment(PolicyVersion(1), 5, 8)),
        ),
    ],
    ids=["token", "log-probability", "mask", "version", "version of one token"],
)
@pytest.mark.parametrize("durable", [True, False])
def test_what_the_log_has_is_not_replaced(
    store: ExperienceStore, other: PartialDelta, durable: bool
) -> None:
    store.partials([make.delta(0, 0, 0, 6)])
    if durable:
        store.flush(1)
    with pytest.raises(LifecycleError, match="tokens 2 to 6 are in the log already"):
        store.partials([other])
    assert_prefix(store.prefix(S00), make.delta(0, 0, 0, 6))


def test_a_gap_and_another_attempt_are_refused(store: ExperienceStore) -> None:
    store.partials([make.delta(0, 0, 0, 6)])
    for delta in (make.delta(0, 0, 7, 9), make.delta(0, 0, 0, 3, attempt=1)):
        with pytest.raises(LifecycleError, match="where the log has 6 tokens of attempt 0"):
            store.partials([delta])
    store.restart_session(S00, attempt=1, reason="start again")
    with pytest.raises(LifecycleError, match="where the log has 0 tokens of attempt 1"):
        store.partials([make.delta(0, 0, 6, 9)])
    with pytest.raises(LifecycleError, match="attempt 3 follows attempt 1"):
        store.restart_session(S00, attempt=3, reason="start again")
    store.check()


def test_one_refused_piece_keeps_the_others_out_of_the_log(store: ExperienceStore) -> None:
    with pytest.raises(LifecycleError):
        store.partials([make.delta(1, 1, 0, 3), make.delta(0, 0, 1, 3)])
    assert_prefix(store.prefix(S11))


def test_a_restart_leaves_tokens_and_results_behind(
    store: ExperienceStore, storage: MemoryStorage
) -> None:
    store.partials([make.delta(0, 0, 0, 6)])
    store.tool_result(make.tool_result(0, 0))
    store.restart_session(S00, attempt=1, reason="start again")
    store.restart_session(S00, attempt=1, reason="start again")
    assert store.tool_results(S00) == {}
    assert_prefix(store.prefix(S00))
    again = make.delta(0, 0, 0, 2, attempt=1)
    store.partials([again])
    with pytest.raises(LifecycleError, match="of attempt 0 in attempt 1"):
        store.tool_result(make.tool_result(0, 0, turn=5))
    store.tool_result(make.tool_result(0, 0, attempt=1, result="5"))
    for one in (store, reopened(store, storage)):
        assert one.prefix(S00).attempt == 1
        assert_prefix(one.prefix(S00), again)
        assert one.tool_results(S00) == {(0, 0): make.tool_result(0, 0, attempt=1, result="5")}
        # What the log has of the attempt that was given up may still be repeated.
        one.tool_result(make.tool_result(0, 0))


def test_results_are_found_again_and_never_replaced(
    store: ExperienceStore, storage: MemoryStorage
) -> None:
    results = [
        make.tool_result(0, 0, turn=t, call=c, result=f"{t}{c}") for t, c in [(0, 0), (0, 1)]
    ]
    done = [store.tool_result(result) for result in results]
    assert not any(future.done() for future in done)
    store.flush(1)
    assert all(future.done() for future in done)
    store = reopened(store, storage)
    position = store.position
    assert store.tool_result(results[1]).result(0) == position
    with pytest.raises(LifecycleError, match="says something else"):
        store.tool_result(make.tool_result(0, 0, turn=0, call=1, result="other"))
    assert store.tool_results(S00) == {(0, 0): results[0], (0, 1): results[1]}
    assert store.tool_results(S11) == {}


def test_nothing_is_kept_of_a_session_that_is_done_or_has_failed(store: ExperienceStore) -> None:
    store.partials([make.delta(0, 0, 0, 2), make.delta(1, 1, 0, 2)])
    store.tool_result(make.tool_result(0, 0))
    store.session_done(make.trajectory(0, 0), reward=1.0)
    store.settle(GroupId(1), GroupOutcome.FAILED, "broke")
    groups = store.state.groups
    assert not groups[GroupId(0)].unfinished
    assert not groups[GroupId(1)].unfinished
    # A piece of a session that was done elsewhere meanwhile is of no use, and no mistake.
    store.partials([make.delta(0, 0, 2, 4)])
    for ask in (store.prefix, store.tool_results):
        with pytest.raises(LifecycleError, match="goes on after its end"):
            ask(S00)
        with pytest.raises(LifecycleError, match="illegal while failed"):
            ask(S11)
    with pytest.raises(LifecycleError, match="goes on after its end"):
        store.tool_result(make.tool_result(0, 0, turn=1))
    with pytest.raises(LifecycleError, match="illegal while failed"):
        store.partials([make.delta(1, 1, 2, 4)])
    store.flush(1)
    store.check()


def test_a_rewind_keeps_partials_and_results(
    store: ExperienceStore, storage: MemoryStorage
) -> None:
    store.flush(1)
    base = store.position
    store.partials([make.delta(0, 0, 0, 5)])
    store.tool_result(make.tool_result(0, 0))
    store.restart_session(S11, attempt=1, reason="start again")
    store.flush(1)
    store = start(storage.process_kill(), base)
    assert_prefix(store.prefix(S00), make.delta(0, 0, 0, 5))
    assert store.tool_results(S00) == {(0, 0): make.tool_result(0, 0)}
    assert store.prefix(S11).attempt == 1


INVALID: dict[str, Callable[[ExperienceStore], object]] = {
    "a session twice": lambda s: s.partials([make.delta(0, 0, 0, 1), make.delta(0, 0, 1, 2)]),
    "other type": lambda s: s.partials([changed(make.delta(0, 0, 0, 2), logprobs_N=np.zeros(2))]),
    "two axes": lambda s: s.partials(
        [changed(make.delta(0, 0, 0, 2), loss_mask_N=np.ones((2, 1), np.uint8))]
    ),
    "version of another type": lambda s: s.partials(
        [changed(make.delta(0, 0, 0, 2), segments=(Segment(np.int64(0), 0, 2),))]
    ),
    "negative attempt": lambda s: s.partials([make.delta(0, 0, 0, 2, attempt=-1)]),
    "start that is no number": lambda s: s.partials([changed(make.delta(0, 0, 0, 2), start="0")]),
    "a result that is no text": lambda s: s.tool_result(ToolResult(S00, 0, 0, 0, "calc", b"4")),
    "a lone surrogate": lambda s: s.tool_result(ToolResult(S00, 0, 0, 0, "calc", "\ud800")),
    "a tool without a name": lambda s: s.tool_result(ToolResult(S00, 0, 0, 0, None, "4")),
    "a negative turn": lambda s: s.tool_result(ToolResult(S00, 0, -1, 0, "calc", "4")),
    "a long result": lambda s: s.tool_result(
        ToolResult(S00, 0, 0, 0, "calc", "4" * (MAX_RESULT_CHARACTERS + 1))
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_a_record_cannot_hold_is_refused(store: ExperienceStore, case: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        INVALID[case](store)
    assert not store.state.groups[GroupId(0)].unfinished
    store.flush(1)


@pytest.mark.parametrize(
    "segments", [(), (Segment(PolicyVersion(0), 0, 1),), (Segment(PolicyVersion(0), 1, 2),)]
)
def test_versions_cover_every_token(store: ExperienceStore, segments: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit together: "):
        store.partials([changed(make.delta(0, 0, 0, 2), segments=segments)])


def test_damaged_tokens_are_not_taken_for_absent(
    store: ExperienceStore, storage: MemoryStorage
) -> None:
    store.partials([make.delta(0, 0, 0, 40)])
    store.flush(1)
    data = bytearray(storage.files()[PAYLOAD])
    data[-60] ^= 1
    storage.damage(PAYLOAD, bytes(data))
    for use in (
        lambda: store.prefix(S00),
        lambda: store.partials([make.delta(0, 0, 20, 60)]),
    ):
        with pytest.raises(DamagedError, match=PAYLOAD):
            use()
    # What needs no reading goes on.
    store.partials([make.delta(0, 0, 40, 60)])
    assert_prefix(store.prefix(S11))


def test_a_reference_that_leads_to_other_tokens_is_damage(
    store: ExperienceStore, storage: MemoryStorage
) -> None:
    store.partials([make.delta(0, 0, 0, 4)])
    store.flush(1)
    store.prefix(S00)
    ref = store.state.groups[GroupId(0)].unfinished[0].parts[0].batch.payload
    for rows, attempt in (([(0, 0, 1, 5)], 0), ([(0, 1, 0, 4)], 0), ([(0, 0, 0, 4)], 1)):
        batch = PartialBatch(make.partials(rows, attempt=attempt), ref)
        with pytest.raises(DamagedError, match="is not that of partials/"):
            read_tokens(PayloadReader(storage), batch)


def test_a_row_that_counted_before_does_not_count_again() -> None:
    state = ExperienceState()
    state.apply(make.at(64), make.submitted(0))
    state.apply(make.at(128), make.partials([(0, 0, 0, 4)]))
    assert not state.apply(make.at(640), make.partials([(0, 0, 0, 4)]))
    assert state.apply(make.at(704), make.partials([(0, 1, 0, 2), (0, 0, 0, 4)]))
    unfinished = state.groups[GroupId(0)].unfinished
    assert [unfinished[index].tokens for index in (0, 1)] == [4, 2]
    state.check()
