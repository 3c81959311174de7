"""The fold over arbitrary legal histories: prefixes, repetitions, rewinds."""

from __future__ import annotations

import experience_records as make
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import LifecycleError
from perdure.core.ids import GroupId, IncarnationNumber
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.core.records import (
    Collect,
    ControlRecord,
    UpdateFailed,
)
from perdure.experience.fold import Placed, fold, rewound
from perdure.experience.state import ExperienceState


def candidates(state: ExperienceState) -> list[ControlRecord]:
    """Records worth trying next; some of them are illegal or repeated."""
    table, step, following = state.table, state.last_step, state.next_update
    found: list[ControlRecord] = [
        make.submitted(table.next_group, step=step + 1),
        make.step_done(step + 1),
        make.published(state.next_version, step),
        make.checkpointed(step, state.position or make.at(0)),
    ]
    for group in list(table.open())[:3]:
        number = group.submitted.group
        found += [make.session_done(session.group, session.index) for session in group.missing]
        found += [make.session_done(number, i, reward=number % 2) for i in range(2)]
        found += [make.settled(number), make.settled(number, GroupOutcome.FAILED)]
    for count in (1, 2):
        batch = list(table.finished)[:count]
        found.append(make.taken(step + 1, batch, local=following.local_update))
    found += [make.evicted(group) for group in list(table.finished)[:2]]
    found += [make.evicted(group.submitted.group) for group in table.failed()]
    if table.owed:
        found.append(make.refilled(table.next_group - 1, next(iter(table.owed))))
    for update in [u for u in state.taken if u.global_step > step]:
        found.append(UpdateFailed(update, IncarnationNumber(1), "raised"))
        poison = EvictionReason.POISON
        found += [make.evicted(GroupId(g), poison) for g in state.taken[update].groups]
    found += [Collect((name,)) for name in [c.directory for c in state.checkpoints][:1]]
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[Placed]:
    """A history that a run could have written."""
    state, log = ExperienceState(), list[Placed]()
    for choice in draw(st.lists(st.integers(0, 99), min_size=60, max_size=100)):
        options = candidates(state)
        record = options[choice % len(options)]
        place = make.at(64 * (len(log) + 1))
        try:
            if state.apply(place, record):
                log.append((place, record))
        except LifecycleError:
            continue
    return log


@given(histories())
def test_a_history_folds_to_a_consistent_state_at_every_record(log: list[Placed]) -> None:
    state = ExperienceState()
    for place, record in log:
        assert state.apply(place, record)
        state.check()


@given(histories(), st.integers(0, 80))
def test_the_fold_of_a_prefix_and_then_the_rest_is_the_fold_of_all(
    log: list[Placed], cut: int
) -> None:
    state = fold(log[:cut])
    for place, record in log[cut:]:
        state.apply(place, record)
    assert make.comparable(state) == make.comparable(fold(log))


@given(histories())
def test_repeating_any_record_of_the_history_changes_nothing(log: list[Placed]) -> None:
    state = fold(log)
    before = make.comparable(state)
    for _, record in log:
        assert not state.apply(None, record)
    assert make.comparable(state) == before


@given(histories())
def test_appending_first_and_learning_the_place_later_comes_to_the_same(log: list[Placed]) -> None:
    late = ExperienceState()
    for _, record in log:
        late.apply(None, record)
    late.acknowledge([make.placed_entry(place, record) for place, record in log])
    assert make.comparable(late) == make.comparable(fold(log))


@given(histories())
def test_every_checkpoint_can_be_gone_back_to(log: list[Placed]) -> None:
    for record in fold(log).checkpoints:
        state = fold(rewound(log, record.position))
        state.check()
        assert state.last_step == record.step
        submitted = state.table.next_group
        assert submitted == fold(log).table.next_group
