"""The life-cycle table, pair by pair."""

from __future__ import annotations

import pytest

from perdure.core.errors import LifecycleError
from perdure.core.ids import GroupId
from perdure.experience.lifecycle import OPEN, GroupEvent, GroupState, advance

S, E = GroupState, GroupEvent
LEGAL = {
    S.PENDING: {E.PROGRESS: S.RUNNING, E.FAIL: S.FAILED},
    S.RUNNING: {E.PROGRESS: S.RUNNING, E.FINISH: S.FINISHED, E.FAIL: S.FAILED},
    S.FINISHED: {E.TAKE: S.TAKEN, E.EVICT: S.EVICTED, E.POISON: S.EVICTED},
    S.FAILED: {E.EVICT: S.EVICTED, E.POISON: S.EVICTED},
    S.TAKEN: {E.TRAIN: S.TRAINED, E.POISON: S.EVICTED},
    S.TRAINED: {},
    S.EVICTED: {},
}


@pytest.mark.parametrize("event", list(GroupEvent), ids=lambda e: e.value)
@pytest.mark.parametrize("state", list(GroupState), ids=lambda s: s.value)
def test_every_pair_goes_where_the_specification_says_or_is_refused(
    state: GroupState, event: GroupEvent
) -> None:
    if event in LEGAL[state]:
        assert advance(GroupId(3), state, event) is LEGAL[state][event]
        return
    with pytest.raises(LifecycleError) as caught:
        advance(GroupId(3), state, event)
    assert caught.value.where == "group 3"
    assert event.value in caught.value.what
    assert state.value in caught.value.what


def test_every_state_is_reached_from_pending_and_ends_trained_or_evicted() -> None:
    reached, frontier = {S.PENDING}, [S.PENDING]
    while frontier:
        for after in set(LEGAL[frontier.pop()].values()) - reached:
            reached.add(after)
            frontier.append(after)
    assert reached == set(GroupState)
    assert {state for state in S if not LEGAL[state]} == {S.TRAINED, S.EVICTED}
    assert {S.PENDING, S.RUNNING} == OPEN
