"""Age, failure and the dynamic filter: who leaves, who replaces, what blocks."""

from __future__ import annotations

import dataclasses

import experience_records as make
import pytest

from perdure.core.ids import GlobalStep, GroupId, PolicyVersion
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.core.records import ControlRecord, Published
from perdure.experience.age_policy import AgePolicy, Decision, SamplingRules, decide, prompt_age
from perdure.experience.fold import fold
from perdure.experience.state import ExperienceState

AGE, FAILED, FILTERED = EvictionReason.AGE, EvictionReason.FAILED, EvictionReason.FILTERED


def state_of(*parts: list[ControlRecord]) -> ExperienceState:
    return fold(make.placed([record for part in parts for record in part]))


def failed_group(group: int, *, step: int = 1) -> list[ControlRecord]:
    return [make.submitted(group, step=step), make.settled(group, GroupOutcome.FAILED)]


def decision(
    state: ExperienceState,
    step: int,
    policy: AgePolicy,
    threshold: int = 2,
    *,
    dynamic_filter: bool = False,
) -> Decision:
    rules = SamplingRules(policy, threshold, dynamic_filter=dynamic_filter)
    return decide(state, global_step=GlobalStep(step), rules=rules)


def test_a_prompt_is_one_step_old_in_the_step_of_its_submission() -> None:
    assert prompt_age(make.submitted(0, step=5), GlobalStep(5)) == 1
    assert prompt_age(make.submitted(0, step=5), GlobalStep(7)) == 3


def test_drop_evicts_finished_groups_above_the_threshold_and_no_others() -> None:
    state = state_of(
        make.finished_group(0, step=0),
        make.finished_group(1, step=4),
        [make.submitted(2, step=0)],
    )
    found = decision(state, 5, AgePolicy.DROP)
    assert found == Decision(evict=((GroupId(0), AGE),), refill=1)


@pytest.mark.parametrize(("step", "leaves"), [(1, False), (2, False), (3, True)])
def test_drop_keeps_a_group_at_exactly_the_threshold(step: int, leaves: bool) -> None:
    state = state_of(make.finished_group(0, step=1))
    assert bool(decision(state, step, AgePolicy.DROP).evict) is leaves


@pytest.mark.parametrize(("step", "blocks"), [(1, False), (2, True), (9, True)])
def test_wait_blocks_from_the_threshold_on_and_evicts_nothing_for_age(
    step: int, blocks: bool
) -> None:
    running: list[ControlRecord] = [make.submitted(1), make.session_done(1, 0), make.submitted(2)]
    state = state_of(make.finished_group(0), running)
    found = decision(state, step, AgePolicy.WAIT)
    assert found.blocked_by == ((GroupId(1), GroupId(2)) if blocks else ())
    assert found.evict == ()
    assert found.refill == 0


def test_wait_is_not_blocked_by_old_terminal_groups() -> None:
    state = state_of(make.finished_group(0, step=1), [make.submitted(1, step=99)])
    assert decision(state, 100, AgePolicy.WAIT, threshold=4) == Decision()


@pytest.mark.parametrize("policy", list(AgePolicy))
def test_failed_groups_leave_under_every_policy(policy: AgePolicy) -> None:
    state = state_of(failed_group(0), make.finished_group(1))
    found = decision(state, 1, policy, threshold=9)
    assert (found.evict, found.refill) == (((GroupId(0), FAILED),), 1)


@pytest.mark.parametrize("policy", list(AgePolicy))
def test_the_dynamic_filter_evicts_groups_of_equal_rewards(policy: AgePolicy) -> None:
    state = state_of(
        make.finished_group(0, rewards=(1.0, 1.0)),
        make.finished_group(1, rewards=(0.0, 0.0)),
        make.finished_group(2, rewards=(0.0, 1.0)),
        make.finished_group(3, rewards=(1.0,)),
    )
    assert decision(state, 1, policy).evict == ()
    found = decision(state, 1, policy, dynamic_filter=True)
    assert found.evict == ((GroupId(0), FILTERED), (GroupId(1), FILTERED))
    assert found.refill == 2


def test_a_group_that_several_reasons_fit_leaves_once() -> None:
    state = state_of(make.finished_group(0, rewards=(1.0, 1.0)))
    found = decision(state, 9, AgePolicy.DROP, dynamic_filter=True)
    assert found == Decision(evict=((GroupId(0), AGE),), refill=1)


def test_evictions_are_listed_oldest_first_whatever_their_reason() -> None:
    state = state_of(
        make.finished_group(0, step=1), failed_group(1, step=9), make.finished_group(2, step=1)
    )
    found = decision(state, 9, AgePolicy.DROP)
    assert found.evict == ((GroupId(0), AGE), (GroupId(1), FAILED), (GroupId(2), AGE))
    assert found.refill == 3


def test_prompts_owed_from_before_a_crash_are_asked_for_until_they_are_submitted() -> None:
    evicted = [*make.finished_group(0), make.evicted(0)]
    assert decision(state_of(evicted), 5, AgePolicy.DROP) == Decision(refill=1)
    paid: list[ControlRecord] = [make.submitted(1, step=5), make.refilled(1, 0)]
    assert decision(state_of(evicted, paid), 5, AgePolicy.DROP) == Decision()


def test_a_threshold_below_the_age_of_a_fresh_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="max_prompt_age 0 is below 1"):
        decision(ExperienceState(), 1, AgePolicy.DROP, threshold=0)


def with_versions(group: int, *versions: tuple[int, int]) -> list[ControlRecord]:
    """A finished group; ``versions`` are the lowest and highest one of each session."""
    done = [
        dataclasses.replace(
            make.session_done(group, index, reward=float(index)),
            first_versions=(PolicyVersion(first),),
            last_versions=(PolicyVersion(last),),
        )
        for index, (first, last) in enumerate(versions)
    ]
    return [make.submitted(group, sessions=len(versions)), *done, make.settled(group)]


def published(*versions: int) -> list[ControlRecord]:
    return [Published(PolicyVersion(v), f"digest-{v}", GlobalStep(v)) for v in versions]


@pytest.mark.parametrize(("limit", "leaves"), [(1, True), (2, True), (3, False), (None, False)])
def test_a_session_of_too_many_versions_takes_its_group_along(
    limit: int | None, leaves: bool
) -> None:
    state = state_of(published(1, 2, 3), with_versions(0, (3, 3), (1, 3)))
    rules = SamplingRules(AgePolicy.WAIT, 9, max_version_span=limit)
    found = decide(state, global_step=GlobalStep(1), rules=rules)
    assert found.evict == (((GroupId(0), EvictionReason.VERSION_SPAN),) if leaves else ())


@pytest.mark.parametrize(("limit", "leaves"), [(0, True), (1, True), (2, False), (None, False)])
def test_a_session_too_far_behind_the_published_version_takes_its_group_along(
    limit: int | None, leaves: bool
) -> None:
    state = state_of(published(1, 2, 3), with_versions(0, (3, 3), (1, 1)))
    rules = SamplingRules(AgePolicy.WAIT, 9, max_version_lag=limit)
    found = decide(state, global_step=GlobalStep(1), rules=rules)
    assert found.evict == (((GroupId(0), EvictionReason.VERSION_LAG),) if leaves else ())


def test_versions_of_a_branch_that_was_left_lag_as_much_as_they_lead() -> None:
    state = state_of(published(1), with_versions(0, (4, 4)))
    found = decide(state, global_step=GlobalStep(1), rules=SamplingRules(max_version_lag=2))
    assert found.evict == ((GroupId(0), EvictionReason.VERSION_LAG),)


def test_a_group_too_old_in_every_way_leaves_once_for_its_age() -> None:
    state = state_of(published(1, 2, 3), with_versions(0, (1, 3)))
    rules = SamplingRules(AgePolicy.DROP, 1, max_version_span=1, max_version_lag=0)
    found = decide(state, global_step=GlobalStep(5), rules=rules)
    assert found == Decision(evict=((GroupId(0), AGE),), refill=1)


@pytest.mark.parametrize("field", ["max_version_span", "max_version_lag"])
def test_limits_that_no_session_can_keep_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} -1 is below"):
        SamplingRules(**{field: -1})
