"""When a loop saves: triggers, budget, back-off and recovery, on simulated time."""

from __future__ import annotations

import math

import pytest

from perdure import every
from perdure.core.errors import ConfigError
from perdure.standalone.policy import SaveTrigger


class Loop:
    """A loop whose steps and saves take as long as a test says."""

    def __init__(self, policy, *, step_s=1.0, step=0):
        self.now_s = 100.0
        self.step = step
        self.step_s = step_s
        self.saves: list[int] = []
        self.warnings: list[str] = []
        self.trigger = SaveTrigger(policy, step=step, now_s=self.now_s)
        self._writing_until_s = 0.0

    def run(self, steps, *, blocked_s=0.0, writes_s=0.0, slowdown=1.0):
        """``writes_s``: a save is written in the background, and steps take ``slowdown`` as long"""
        for _ in range(steps):
            saving = self.now_s < self._writing_until_s
            self.now_s += self.step_s * (slowdown if saving else 1.0)
            self.step += 1
            self.trigger.step_completed(self.now_s, saving=self.now_s < self._writing_until_s)
            decision = self.trigger.decide(self.step, self.now_s)
            if decision.warning:
                self.warnings.append(decision.warning)
            if decision.save:
                started_s = self.now_s
                self.now_s += blocked_s
                self.trigger.saved(self.step, started_s=started_s, ended_s=self.now_s)
                self._writing_until_s = self.now_s + writes_s
                self.saves.append(self.step)


def test_steps_or_time_whichever_comes_first() -> None:
    by_steps = Loop(every(steps=10, minutes=1), step_s=1.0)
    by_steps.run(35)
    assert by_steps.saves == [10, 20, 30]
    by_time = Loop(every(steps=10, minutes=1), step_s=25.0)
    by_time.run(10)
    assert by_time.saves == [3, 6, 9, 10]


def test_minutes_and_seconds_add_up() -> None:
    loop = Loop(every(minutes=1, seconds=30), step_s=30.0)
    loop.run(9)
    assert loop.saves == [3, 6, 9]


def test_a_resumed_loop_saves_at_the_same_multiples() -> None:
    loop = Loop(every(steps=10), step=17)
    loop.run(20)
    assert loop.saves == [20, 30]


def test_a_cheap_save_is_never_held_back() -> None:
    loop = Loop(every(steps=10), step_s=1.0)
    loop.run(100, blocked_s=0.9)
    assert loop.saves == list(range(10, 101, 10))
    assert loop.warnings == []


def test_saves_that_block_too_long_come_less_often_and_stay_within_the_budget() -> None:
    loop = Loop(every(steps=10), step_s=1.0)
    began_s = loop.now_s
    loop.run(1000, blocked_s=4.0)
    assert loop.saves[0] == 10
    assert len(loop.warnings) == 1
    assert "4 s" in loop.warnings[0]
    assert "40 s" in loop.warnings[0]
    cost_s = 4.0 * len(loop.saves)
    # The first save is free to be made: nothing was measured before it.
    assert cost_s <= 0.1 * (loop.now_s - began_s) + 4.0
    assert cost_s >= 0.08 * (loop.now_s - began_s)


def test_slower_steps_while_writing_count_as_much_as_blocking() -> None:
    loop = Loop(every(steps=10), step_s=1.0)
    loop.run(10, writes_s=8.0, slowdown=2.0)
    loop.run(300, writes_s=8.0, slowdown=2.0)
    # Four steps of double length under each save cost 4 s, so saves are 40 s apart.
    assert loop.trigger.cost_s == pytest.approx(4.0)
    gaps = [later - earlier for earlier, later in zip(loop.saves, loop.saves[1:], strict=False)]
    assert min(gaps[1:]) >= 36
    assert len(loop.warnings) == 1


def test_the_budget_can_be_raised() -> None:
    loop = Loop(every(steps=10, budget=0.5), step_s=1.0)
    loop.run(100, blocked_s=4.0)
    assert loop.saves == list(range(10, 101, 10))


def test_recovery_is_slow_and_a_new_stretch_warns_again() -> None:
    loop = Loop(every(steps=10), step_s=1.0)
    loop.run(200, blocked_s=8.0)
    assert loop.trigger.least_interval_s == pytest.approx(80.0)
    before = len(loop.saves)
    loop.run(90, blocked_s=0.1)
    after_one = loop.trigger.least_interval_s
    assert 30 < after_one <= 80
    assert len(loop.saves) - before <= 3
    loop.run(1000, blocked_s=0.1)
    assert loop.trigger.least_interval_s < 10
    assert loop.saves[-1] - loop.saves[-2] == 10
    assert len(loop.warnings) == 1
    loop.run(100, blocked_s=8.0)
    assert len(loop.warnings) == 2


def test_a_skipped_save_waits_for_the_next_interval() -> None:
    loop = Loop(every(steps=10), step_s=1.0)
    loop.trigger.skipped(10, loop.now_s)
    assert not loop.trigger.decide(19, loop.now_s).save
    assert loop.trigger.decide(20, loop.now_s).save


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"steps": 0},
        {"minutes": 0},
        {"seconds": -1},
        {"minutes": math.inf},
        {"steps": 1, "budget": 0},
        {"steps": 1, "budget": 1.5},
    ],
)
def test_a_policy_that_means_nothing_is_refused(wrong) -> None:
    with pytest.raises(ConfigError, match="every"):
        every(**wrong)
