"""Rules of retention: what stays, why, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from standalone_loops import Script, committed, read_log

from perdure import every, keep
from perdure.checkpoint.keep import Keep, Metrics, why_kept
from perdure.core.errors import ConfigError
from perdure.core.ids import IncarnationNumber, LogPosition
from perdure.core.records import Checkpointed
from perdure.runtime.maintenance import Collecting, why_kept_now, would_collect
from perdure.storage import MemoryStorage


def record(step: int, phase: str = "train") -> Checkpointed:
    return Checkpointed(f"{phase}-{step}", phase, step, "", LogPosition(IncarnationNumber(1), 0, 0))


def kept(rules: Keep, steps: Mapping[int, float | None], **more: Any) -> dict[int, tuple[str, ...]]:
    """Step → reasons, of those that stay; a value of None is an unreadable manifest."""

    def metrics_of(one: Checkpointed) -> Metrics | None:
        value = steps[one.step]
        return None if value is None else {"reward": value}

    why = why_kept([record(step) for step in steps], rules, metrics_of=metrics_of, **more)
    return {step: why[f"train-{step}"] for step in steps if why[f"train-{step}"]}


def test_the_first_of_each_window_stays_whatever_steps_are_saved() -> None:
    steps = dict.fromkeys((0, 7, 20, 24, 27, 31, 55, 56), 0.0)
    assert kept(keep(last=1, every=10), steps) == {
        20: ("every",),
        31: ("every",),
        55: ("every",),
        56: ("last",),
    }


def test_steps_of_the_warm_start_are_another_clock() -> None:
    records = [record(100, "warm"), record(200, "warm"), record(0), record(100), record(110)]
    why = why_kept(records, keep(last=1, every=100), metrics_of=lambda _: {})
    assert [name for name, reasons in why.items() if reasons] == ["train-100", "train-110"]


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("max", [1.0, 3.0, 2.0, 0.0], {1, 2}),
        ("min", [1.0, 3.0, 2.0, 0.0, 9.0], {0, 3}),
        ("max", [5.0, 5.0, 5.0, 1.0], {0, 1}),
        ("max", [math.nan, 1.0, math.inf, 0.5, -math.inf, 0.0], {1, 3}),
    ],
)
def test_the_best_stay_and_among_equals_the_older(
    mode: Any, values: list[float], expected: set[int]
) -> None:
    found = kept(keep(last=1, best=("reward", mode, 2)), dict(enumerate(values)))
    best = {step for step, why in found.items() if any(w.startswith("best ") for w in why)}
    assert best == expected
    assert set(found) == expected | {len(values) - 1}


def test_one_that_may_be_the_best_is_not_deleted_on_suspicion() -> None:
    found = kept(keep(last=1, best=("reward", "max", 1)), {1: None, 2: 1.0, 3: 2.0, 4: 0.0})
    assert found == {1: ("unreadable",), 3: ("best reward 2",), 4: ("last",)}
    assert kept(keep(last=1), {1: None, 2: None}) == {2: ("last",)}


def test_the_newest_verified_one_stays() -> None:
    steps = dict.fromkeys(range(5), 0.0)
    found = kept(keep(last=2), steps, verified={"train-0", "train-1"})
    assert found == {1: ("verified",), 3: ("last",), 4: ("last",)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": 0},
        {"every": 0},
        {"best": ("reward", "most", 1)},
        {"best": ("reward", "max", 0)},
        {"best": ("reward", "max")},
        {"best": ("", "max", 1)},
    ],
)
def test_rules_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keep=3"):
        keep(**wrong)


RULES = keep(last=2, every=10, best=("reward", "max", 2))


def rewards(script: Script, values: Mapping[int, float]) -> Any:
    def each(step: int) -> None:
        if step in values:
            script.engine.report(reward=values[step])

    return each


def test_a_script_keeps_by_rules_and_its_run_says_why() -> None:
    storage = MemoryStorage()
    script = Script(storage, save=every(steps=4), keep=RULES)
    script.run(24, each=rewards(script, {3: 0.1, 8: 0.9, 14: 0.4, 18: 0.2}))
    state, _ = read_log(storage)
    assert committed(storage) == [8, 12, 16, 20, 24]
    why = {
        record.step: why_kept_now(storage, state)[record.directory] for record in state.checkpoints
    }
    assert why == {
        8: ("best reward 0.9",),
        12: ("every",),
        16: ("best reward 0.4",),
        20: ("last", "every"),
        24: ("last",),
    }


def test_collecting_follows_the_rules_of_the_run_unless_told_otherwise() -> None:
    storage = MemoryStorage()
    script = Script(storage, save=every(steps=4), keep=RULES)
    script.run(24, each=rewards(script, {8: 0.9, 16: 0.4}))
    assert would_collect(storage, Collecting()).plan.surplus == ()
    plan = would_collect(storage, Collecting(1)).plan
    assert plan.surplus == ()
    assert plan.kept["step-00000024-1"] == ("last", "verified")
    plan = would_collect(storage, Collecting(archival=False)).plan
    assert [*plan.kept] == ["step-00000020-1", "step-00000024-1"]


def test_a_metric_that_no_checkpoint_has_is_named_once() -> None:
    script = Script(
        MemoryStorage(), save=every(steps=2), keep=keep(last=1, best=("rewrd", "max", 1))
    )
    script.run(12, each=rewards(script, {4: 1.0}))
    assert script.events.warnings() == ["no checkpoint has the metric rewrd; known here: reward"]


def test_what_was_measured_counts_for_one_checkpoint() -> None:
    storage = MemoryStorage()
    script = Script(storage, save=every(steps=1), keep=keep(last=1, best=("reward", "max", 9)))
    script.run(6, each=rewards(script, {2: 1.0, 4: math.nan, 5: 2.0}))
    assert committed(storage) == [2, 5, 6]
