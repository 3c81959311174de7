"""When an idle learner generates: the rule of spec B4, with the numbers it should give."""

from __future__ import annotations

import pytest

from perdure.trainers.spillover import (
    GroupPace,
    Situation,
    SpilloverRules,
    SwitchCosts,
    Threshold,
    decide_spillover,
)

RULES = SpilloverRules(ratio=0.25, step_up=0.05, step_down=0.025, hysteresis=2, window=3)


def situation(
    missing: int = 1,
    *,
    queued: int = 5,
    scaling: float = 2.0,
    pace: float | None = 2.0,
    switch_s: float | None = 7.0,
) -> Situation:
    return Situation(missing, queued, scaling, seconds_per_group=pace, switch_s=switch_s)


@pytest.mark.parametrize(
    ("ratio", "updates", "groups"),
    [(0.5, 4, 32), (1.0, 4, 64), (0.01, 4, 16), (0.25, 4, 16), (0.25, 1, 64)],
)
def test_a_threshold_lies_between_an_update_and_a_batch(
    ratio: float, updates: int, groups: int
) -> None:
    assert Threshold(RULES, ratio).groups(batch=64, updates=updates) == groups


@pytest.mark.parametrize(
    ("pace", "saves_s", "lend"), [(2.0, 1.0, False), (14.0, 7.0, False), (16.0, 8.0, True)]
)
def test_the_learner_is_lent_for_more_than_the_switch_costs(
    pace: float, saves_s: float, lend: bool
) -> None:
    decision = decide_spillover(situation(pace=pace))
    assert (decision.lend, decision.saves_s) == (lend, saves_s)


def test_more_missing_groups_and_more_slots_make_it_worth_more() -> None:
    assert decide_spillover(situation(8)).saves_s == 8.0
    assert decide_spillover(situation(8, scaling=4.0)).saves_s == 12.0


@pytest.mark.parametrize(
    ("now", "lend", "reason"),
    [
        (situation(0), False, "enough groups are ready"),
        (situation(-3, pace=None), False, "enough groups are ready"),
        (situation(scaling=1.0, pace=None), False, "the learner's devices have no engine"),
        (situation(queued=0, pace=100.0), False, "the engines have free slots"),
        (situation(pace=None), True, "nothing was measured yet"),
        (situation(switch_s=None), True, "nothing was measured yet"),
    ],
)
def test_what_decides_before_the_costs_do(now: Situation, lend: bool, reason: str) -> None:
    decision = decide_spillover(now)
    assert (decision.lend, decision.reason, decision.saves_s) == (lend, reason, None)


def test_costs_are_those_of_the_last_switches() -> None:
    costs = SwitchCosts(window=3)
    assert costs.switch_s is None
    for join_s, leave_s in [(100.0, 50.0), (2.0, 1.0), (4.0, 3.0), (6.0, 5.0)]:
        costs.joins_s.append(join_s)
        costs.leaves_s.append(leave_s)
    assert costs.switch_s == 7.0


def test_a_pace_is_that_of_the_pool_alone() -> None:
    pace = GroupPace(window=2)
    assert pace.seconds_per_group is None
    pace.settled(0, seconds=5.0, scaling=1.0)
    assert pace.seconds_per_group is None
    pace.settled(10, seconds=10.0, scaling=2.0)
    assert pace.seconds_per_group == 2.5
    # The wait in which nothing has settled is forgotten.
    pace.settled(10, seconds=40.0, scaling=1.0)
    assert pace.seconds_per_group == 3.0


def ratios(idle: list[bool], *, ratio: float = 0.5) -> list[float]:
    threshold, found = Threshold(RULES, ratio), []
    for one in idle:
        threshold = threshold.after(idle=one)
        found.append(round(threshold.ratio, 6))
    return found


@pytest.mark.parametrize(
    ("idle", "expected"),
    [
        ([True] * 3, [0.5, 0.55, 0.6]),
        ([False] * 4, [0.5, 0.475, 0.45, 0.425]),
        ([False, False, False, True], [0.5, 0.475, 0.45, 0.45]),
        ([True, False] * 3, [0.5] * 6),
    ],
)
def test_the_ratio_follows_idle_time_with_hysteresis(
    idle: list[bool], expected: list[float]
) -> None:
    assert ratios(idle) == expected


def test_the_ratio_stays_a_share() -> None:
    assert max(ratios([True] * 30)) == 1.0
    assert min(ratios([False] * 30)) == 0.0


@pytest.mark.parametrize(
    "wrong", [{"ratio": 0.0}, {"ratio": -0.1}, {"ratio": 1.5}, {"window": 0}, {"hysteresis": 0}]
)
def test_constants_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SpilloverRules(**wrong)  # pyright: ignore[reportArgumentType]
