"""Fault plans count every hit and fire exactly where told."""

from __future__ import annotations

import os
import signal

import pytest

from perdure.core.faults import (
    FaultAction,
    FaultHook,
    FaultPlan,
    FaultPoint,
    FaultRule,
    InjectedFault,
    NoFaults,
)


def test_no_faults_never_fail() -> None:
    hook: FaultHook = NoFaults()
    for point in FaultPoint:
        hook.reach(point)


def test_a_rule_fires_at_its_hit_and_only_there() -> None:
    rule = FaultRule(FaultPoint.STEP_DONE, hit=3, action=FaultAction.RAISE)
    plan = FaultPlan([rule])
    for _ in range(2):
        plan.reach(FaultPoint.STEP_DONE)
        plan.reach(FaultPoint.BATCH_TAKEN)
    assert plan.fired == []
    with pytest.raises(InjectedFault, match="step_done hit 3"):
        plan.reach(FaultPoint.STEP_DONE)
    plan.reach(FaultPoint.STEP_DONE)
    assert plan.fired == [rule]
    assert plan.hits == {FaultPoint.STEP_DONE: 4, FaultPoint.BATCH_TAKEN: 2}


@pytest.mark.parametrize(
    ("action", "number"),
    [(FaultAction.KILL, signal.SIGKILL), (FaultAction.STOP, signal.SIGSTOP)],
)
def test_kill_and_stop_signal_the_own_process(
    monkeypatch: pytest.MonkeyPatch, action: FaultAction, number: signal.Signals
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, sig: sent.append((pid, sig)))
    plan = FaultPlan([FaultRule(FaultPoint.REDO_STEP, action=action)])
    plan.reach(FaultPoint.REDO_STEP)
    assert sent == [(os.getpid(), number)]
    assert len(plan.fired) == 1


def test_observers_see_every_hit_before_it_fails() -> None:
    plan = FaultPlan([FaultRule(FaultPoint.COLLECTED, action=FaultAction.RAISE)])
    seen: list[FaultPoint] = []
    plan.observers.append(seen.append)
    plan.reach(FaultPoint.REDO_DONE)
    with pytest.raises(InjectedFault):
        plan.reach(FaultPoint.COLLECTED)
    assert seen == [FaultPoint.REDO_DONE, FaultPoint.COLLECTED]


def test_a_plan_reads_from_json() -> None:
    text = '[{"point": "step_done", "hit": 2, "action": "stop"}, {"point": "log_fsynced"}]'
    assert FaultPlan.from_json(text).rules == (
        FaultRule(FaultPoint.STEP_DONE, 2, FaultAction.STOP),
        FaultRule(FaultPoint.LOG_FSYNCED, 1, FaultAction.KILL),
    )


@pytest.mark.parametrize(
    "text", ['[{"point": "nowhere"}]', '[{"point": "step_done", "action": "x"}]']
)
def test_an_unknown_point_or_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid"):
        FaultPlan.from_json(text)


def test_point_names_are_unique_and_lower_case() -> None:
    assert all(point.value == point.name.lower() for point in FaultPoint)
