"""The fold: what each record changes, what it refuses, and what a rewind leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import experience_records as make
import pytest

from perdure.core.errors import LifecycleError
from perdure.core.ids import GlobalStep, GroupId, IncarnationNumber, PolicyVersion, SessionId
from perdure.core.record_types import EvictionReason, GroupOutcome, Stream
from perdure.core.records import (
    Closed,
    Collect,
    ControlRecord,
    Evaluated,
    IncarnationStarted,
    PhaseStep,
    Redone,
    SegmentOpened,
    UpdateFailed,
)
from perdure.experience.fold import fold, rewound
from perdure.experience.lifecycle import GroupState
from perdure.experience.state import ExperienceState

POISON = EvictionReason.POISON


@pytest.fixture
def state() -> Iterator[ExperienceState]:
    value = ExperienceState()
    yield value
    value.check()


def apply_all(state: ExperienceState, records: list[ControlRecord]) -> None:
    for position, record in make.placed(
        records, start=state.position.offset if state.position else 0
    ):
        assert state.apply(position, record)


def two_steps() -> list[ControlRecord]:
    """Two steps of two groups each, with two groups left over."""
    records: list[ControlRecord] = []
    for group in range(6):
        records += make.finished_group(group, step=1 + group // 2)
    records += [make.taken(1, [0, 1]), make.step_done(1), make.published(1, 1)]
    return [*records, make.taken(2, [2, 3]), make.step_done(2), make.published(2, 2)]


def test_a_group_lives_through_every_state_and_counts_add_up(state: ExperienceState) -> None:
    seen: list[GroupState] = []
    for record in [*make.finished_group(0), make.taken(1, [0]), make.step_done(1)]:
        apply_all(state, [record])
        state.check()
        seen.append(state.table.state_of(GroupId(0)))
    s = GroupState
    assert seen == [s.PENDING, s.RUNNING, s.RUNNING, s.FINISHED, s.TAKEN, s.TRAINED]
    assert state.counts[s.TRAINED] == 1
    assert sum(state.counts.values()) == 1


def test_what_the_log_says_is_found_under_its_names(state: ExperienceState) -> None:
    checkpoint = make.checkpointed(1, make.at(640))
    done = Redone(GlobalStep(1), "other", False, IncarnationNumber(2))
    evaluated = Evaluated(GlobalStep(1), "digest-1", {"accuracy": 0.5}, {})
    warm = PhaseStep("warm", 10, "w", {}, {}, final=True)
    started = IncarnationStarted(IncarnationNumber(1), IncarnationNumber(0))
    apply_all(
        state,
        [
            SegmentOpened("r", IncarnationNumber(1), Stream.CONTROL, 0),
            started,
            warm,
            *two_steps(),
            checkpoint,
            done,
            evaluated,
            Closed(IncarnationNumber(1), "finished"),
        ],
    )
    assert [u.key() for u in state.taken] == ["u1.0", "u2.0"]
    assert state.step_done[GlobalStep(2)].digest == "digest-2"
    assert state.last_step == 2
    assert state.next_update == make.update_id(3)
    assert state.published[PolicyVersion(2)].global_step == 2
    assert state.evaluated[GlobalStep(1), "digest-1"] is evaluated
    assert state.phase_steps["warm", 10].final
    assert state.redone[GlobalStep(1), IncarnationNumber(2)] is done
    assert list(state.checkpoints) == [checkpoint]
    assert state.incarnations == [started]
    assert state.closed[0].reason == "finished"
    assert (state.table.next_group, state.table.next_data_index) == (6, 6)


def test_a_repeated_record_changes_nothing_and_keeps_its_first_place(
    state: ExperienceState,
) -> None:
    records = [*two_steps(), make.checkpointed(1, make.at(64))]
    apply_all(state, records)
    before, end = make.comparable(state), state.position
    assert end is not None
    for record in records:
        place = state.position_of(record)
        assert not state.apply(make.at(end.offset + 64), record)
        assert state.position_of(record) == place
    assert state.position_of(records[-1]) == end
    assert make.comparable(state) == before


@pytest.mark.parametrize(
    "conflict",
    [
        make.submitted(5, step=9),
        make.taken(2, [3, 2]),
        make.step_done(2, "other digest"),
        dataclasses.replace(make.published(2), digest="other weights"),
    ],
    ids=lambda record: record.key(),
)
def test_a_repeated_record_that_says_something_else_is_refused(
    state: ExperienceState, conflict: ControlRecord
) -> None:
    apply_all(state, two_steps())
    with pytest.raises(LifecycleError, match="says something else"):
        state.apply(None, conflict)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (make.submitted(7), "group 6 is next"),
        (dataclasses.replace(make.submitted(6), data_index=9), "data index 9"),
        (make.submitted(6, sessions=0), "with 0 sessions"),
        (make.session_done(6, 0), "never submitted"),
        (make.session_done(5, 2), "session 2 of a group with 2 sessions"),
        (make.sessions_done([(4, 0), (6, 0)]), "never submitted"),
        (make.settled(6), "never submitted"),
        (make.taken(4, [4]), "u3.0 is next"),
        (make.taken(3, [4], local=1), "u3.0 is next"),
        (make.taken(3, [5]), "oldest finished are [4]"),
        (make.taken(3, [5, 4]), "oldest finished are [4, 5]"),
        (make.taken(3, []), "taken where"),
        (make.taken(3, [4, 5, 0]), "taken where"),
        (make.step_done(3), "0 batches taken"),
        (make.step_done(4), "step 3 is next"),
        (make.evicted(0), "illegal while trained"),
        (make.evicted(0, POISON), "illegal while trained"),
        (make.refilled(5, 4), "no prompt is owed"),
        (Redone(GlobalStep(3), "d", True, IncarnationNumber(1)), "only a step that was done"),
        (UpdateFailed(make.update_id(3), IncarnationNumber(1), "x"), "only a batch that was taken"),
        (make.tool_result(4, 0), "illegal while finished"),
        (make.restarted(4, 0), "illegal while finished"),
        (make.partials([(5, 2, 0, 4)]), "session 2 of a group with 2 sessions"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.key(),
)
def test_what_may_not_follow_is_refused_and_changes_nothing(
    state: ExperienceState, record: ControlRecord, message: str
) -> None:
    apply_all(state, two_steps())
    before = make.comparable(state)
    with pytest.raises(LifecycleError) as caught:
        state.apply(None, record)
    assert message in str(caught.value)
    assert make.comparable(state) == before


def test_rows_count_once_each_whatever_record_they_come_in(state: ExperienceState) -> None:
    apply_all(state, [make.submitted(group, sessions=3) for group in range(2)])
    apply_all(state, [make.sessions_done([(1, 0), (0, 2)], reward=1.0, version=4)])
    apply_all(state, [make.sessions_done([(0, 2), (0, 0), (1, 0)], reward=2.0, version=3)])
    assert not state.apply(None, make.sessions_done([(0, 0), (1, 0)], reward=3.0))
    rewards = {g: {i: s.reward for i, s in v.done.items()} for g, v in state.groups.items()}
    assert rewards == {0: {2: 1.0, 0: 2.0}, 1: {0: 1.0}}
    assert state.table.newest_version == 4
    assert [s.index for s in state.groups[GroupId(0)].missing] == [1]


def test_a_session_twice_in_one_record_is_refused(state: ExperienceState) -> None:
    apply_all(state, [make.submitted(0)])
    with pytest.raises(LifecycleError, match="twice"):
        state.apply(None, make.sessions_done([(0, 0), (0, 1), (0, 0)]))
    assert state.groups[GroupId(0)].done == {}


def test_a_record_with_one_illegal_row_changes_nothing(state: ExperienceState) -> None:
    apply_all(state, [make.submitted(0), make.submitted(1), make.settled(1, GroupOutcome.FAILED)])
    before = make.comparable(state)
    with pytest.raises(LifecycleError, match="illegal while failed"):
        state.apply(make.at(10**6), make.sessions_done([(0, 0), (1, 0)]))
    assert make.comparable(state) == before


def test_a_group_may_not_finish_without_all_its_sessions_but_may_fail(
    state: ExperienceState,
) -> None:
    apply_all(state, [make.submitted(0), make.session_done(0, 1), make.submitted(1)])
    with pytest.raises(LifecycleError, match=r"without g0\.s0"):
        state.apply(None, make.settled(0))
    apply_all(state, [make.settled(0, GroupOutcome.FAILED), make.settled(1, GroupOutcome.FAILED)])
    assert [group.reason for group in state.table.failed()] == ["broke", "broke"]
    with pytest.raises(LifecycleError):
        state.apply(None, make.taken(1, [0]))


def test_finished_groups_are_offered_oldest_submission_first(state: ExperienceState) -> None:
    apply_all(state, [make.submitted(group, sessions=1) for group in range(4)])
    for group in (3, 0, 2):
        apply_all(state, [make.session_done(group, 0), make.settled(group)])
    assert list(state.table.finished) == [0, 2, 3]
    apply_all(state, [make.taken(1, [0, 2])])
    assert list(state.table.finished) == [3]
    apply_all(state, [make.session_done(1, 0), make.settled(1)])
    assert list(state.table.finished) == [1, 3]
    assert list(state.table.open()) == []


def test_what_a_session_leaves_sets_its_group_running(state: ExperienceState) -> None:
    apply_all(state, [make.submitted(group) for group in range(4)])
    apply_all(state, [make.tool_result(0, 0), make.partials([(1, 1, 0, 4)]), make.restarted(2, 0)])
    states = [group.state for group in state.table.open()]
    assert states == [GroupState.RUNNING] * 3 + [GroupState.PENDING]
    assert state.groups[GroupId(1)].missing == (
        SessionId(GroupId(1), 0),
        SessionId(GroupId(1), 1),
    )


def test_every_eviction_owes_exactly_one_prompt(state: ExperienceState) -> None:
    for group in range(3):
        apply_all(state, make.finished_group(group))
    apply_all(state, [make.evicted(1), make.evicted(0, EvictionReason.FILTERED)])
    assert list(state.table.owed) == [1, 0]
    apply_all(state, [make.submitted(3, step=4), make.refilled(3, 1)])
    assert list(state.table.owed) == [0]
    for wrong in (make.refilled(3, 0), make.refilled(9, 0), make.refilled(2, 2)):
        with pytest.raises(LifecycleError):
            state.apply(None, wrong)
    assert not state.apply(None, make.refilled(3, 1))
    assert not state.apply(None, make.evicted(1))
    assert state.table.evictions == {EvictionReason.AGE: 1, EvictionReason.FILTERED: 1}


def test_a_poisoned_batch_is_set_aside_and_not_redone(state: ExperienceState) -> None:
    for group in range(3):
        apply_all(state, make.finished_group(group))
    apply_all(state, [make.taken(1, [0, 1])])
    for incarnation in (1, 2):
        failed = UpdateFailed(make.update_id(1), IncarnationNumber(incarnation), "killed")
        apply_all(state, [failed])
    assert state.update_failures[make.update_id(1)] == 2
    apply_all(state, [make.evicted(group, POISON) for group in (0, 1)])
    assert state.is_poisoned(make.update_id(1))
    assert state.next_update == make.update_id(1, 1)
    apply_all(state, [make.taken(1, [2], local=1), make.step_done(1)])
    assert [state.is_poisoned(update) for update in state.taken] == [True, False]
    assert state.counts[GroupState.TRAINED] == 1


def test_collected_checkpoints_leave_and_retire_what_no_redo_needs(state: ExperienceState) -> None:
    apply_all(state, [make.checkpointed(5, make.at(0), phase="warm"), *two_steps()])
    apply_all(state, [make.checkpointed(step, make.at(64)) for step in (1, 2)])
    apply_all(state, [Collect(("warm-00000005-1",))])
    assert [c.step for c in state.checkpoints] == [1, 2]
    assert set(state.table.retired) == {0, 1}
    assert state.table.state_of(GroupId(0)) is GroupState.TRAINED
    before = make.comparable(state)
    for record in [*make.finished_group(0), make.taken(1, [0, 1]), make.step_done(1)]:
        assert not state.apply(None, record)
    assert make.comparable(state) == before
    with pytest.raises(LifecycleError, match="already trained"):
        state.apply(None, make.session_done(0, 2))


def test_a_rewind_voids_decisions_and_frees_their_groups() -> None:
    records = [*two_steps(), make.evicted(4), make.submitted(6, step=3), make.refilled(6, 4)]
    log = make.placed(records)
    base = next(place for place, record in log if record == make.step_done(1))
    state = fold(rewound(log, base))
    state.check()
    assert list(state.table.finished) == [2, 3, 4, 5]
    assert list(state.table.owed) == []
    assert state.table.next_group == 7
    assert state.next_update == make.update_id(2)
    assert not state.published
    assert fold(rewound(log, None)).last_step == 2


def test_a_version_is_never_given_twice_even_after_a_rewind() -> None:
    group = [make.submitted(0, sessions=1), make.session_done(0, 0, version=4), make.settled(0)]
    log = make.placed([make.published(1), *group, make.published(7)])
    assert fold(log).next_version == 8
    assert fold(rewound(log, make.at(64))).next_version == 5


def test_an_illegal_record_in_a_log_is_reported_with_its_place() -> None:
    with pytest.raises(LifecycleError) as caught:
        fold(make.placed([make.submitted(0), make.settled(0)]))
    assert "log position 1/0/128" in str(caught.value)


def test_the_work_for_one_update_does_not_grow_with_the_run() -> None:
    """Counts the groups that are looked at, not time."""
    state = ExperienceState()
    looked: list[int] = []
    for step in range(1, 200):
        for group in range(2 * step - 2, 2 * step):
            apply_all(state, make.finished_group(group, step=step))
        before = list(state.table.finished)
        looked.append(len(before) + len(list(state.table.open())))
        apply_all(state, [make.taken(step, before), make.step_done(step)])
        apply_all(state, [make.checkpointed(step, make.at(64 * step))])
        if step > 2:
            apply_all(state, [Collect((make.checkpointed(step - 2, make.at(0)).directory,))])
    assert set(looked) == {2}
    assert len(state.groups) == 2
    state.check()


def test_the_checkpoint_that_a_rewind_goes_back_to_stays_committed() -> None:
    log = make.placed(two_steps())
    base = next(place for place, record in log if record == make.step_done(1))
    later = [make.checkpointed(1, base), make.checkpointed(2, log[-1][0])]
    log += make.placed(later, start=log[-1][0].offset)
    assert fold(rewound(log, base)).checkpoints == (later[0],)
