"""What changed since: bounded memory, complete or said to be not."""

from __future__ import annotations

import experience_records as make
import pytest

from perdure.core.ids import GroupId
from perdure.experience.changes import ChangeFeed
from perdure.experience.lifecycle import GroupState
from perdure.experience.state import ExperienceState


def test_a_group_is_told_once_at_its_newest_change() -> None:
    feed = ChangeFeed()
    for group in (3, 1, 3, 2, 1):
        feed.add(GroupId(group))
    assert feed.since(0) == [3, 2, 1]
    assert feed.since(3) == [2, 1]
    assert feed.since(feed.cursor) == []


@pytest.mark.parametrize(("cursor", "told"), [(0, None), (1, None), (2, [4, 5, 6]), (4, [6])])
def test_what_is_forgotten_is_said_to_be(cursor: int, told: list[int] | None) -> None:
    feed = ChangeFeed(limit=3)
    for group in (2, 3, 4, 5, 6):
        feed.add(GroupId(group))
    assert feed.since(cursor) == told


def test_a_consumer_that_is_too_late_gets_every_group_that_still_counts() -> None:
    state = ExperienceState()
    state.table.feed = ChangeFeed(limit=4)
    records = [*make.finished_group(0), *make.finished_group(1), make.evicted(0), make.submitted(2)]
    for position, record in make.placed(records):
        state.apply(position, record)
    changes = state.table.changes(0)
    assert not changes.complete
    assert changes.states == {1: GroupState.FINISHED, 2: GroupState.PENDING}
    assert state.table.changes(changes.cursor) == (changes.cursor, {}, True)
    state.apply(None, make.settled(2, make.GroupOutcome.FAILED))
    assert state.table.changes(changes.cursor).states == {2: GroupState.FAILED}
