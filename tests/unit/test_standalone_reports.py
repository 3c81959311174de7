"""Reports of users of other engines, each with the value that would have been right.

Every loop is saved by one engine and restored by another one into parts that are made anew. The
letters and numbers are those of the collected reports; each test says what used to go wrong.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from standalone_loops import Events, StillClock, committed

from perdure import CheckpointEngine, every
from perdure.checkpoint import ReplayRing, RingOptions
from perdure.core.components import ComponentState
from perdure.core.errors import ConfigError
from perdure.storage import MemoryStorage


def engine_over(storage: MemoryStorage, parts: dict[str, Any], **options: Any) -> CheckpointEngine:
    options = {"save": every(steps=1, budget=1.0), "clock": StillClock()} | options
    engine = CheckpointEngine("run", storage=storage, **options)
    engine.register(**parts)
    return engine


def save(storage: MemoryStorage, parts: dict[str, Any], *, step: int = 1) -> None:
    """Save ``parts`` as they are after ``step`` steps of a run of 4096."""
    engine = engine_over(storage, parts, save=every(steps=step))
    engine.start(4096)
    with engine:
        while engine.step < step:
            engine.complete_step()


def restore(storage: MemoryStorage, parts: dict[str, Any], **options: Any) -> CheckpointEngine:
    """Restore into parts that were just made."""
    engine = engine_over(storage, parts, **options)
    engine.start()
    engine.close()
    return engine


def saved_and_restored(make: Callable[[], Any], change: Callable[[Any], object]) -> Any:
    """A part made anew that has the state of one that was changed."""
    storage = MemoryStorage()
    old = make()
    change(old)
    save(storage, {"part": old})
    new = make()
    restore(storage, {"part": new})
    return new


# Counters, schedules, exploration


def lr_after(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> float:
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
    return schedule.get_last_lr()[0]


def linear(horizon: int) -> dict[str, Any]:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / horizon)
    return {"module": module, "optimizer": optimizer, "schedule": schedule}


def closed_form(horizon: int) -> dict[str, Any]:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=horizon)
    return {"module": module, "optimizer": optimizer, "schedule": schedule}


@pytest.mark.parametrize("make", [linear, closed_form])
def test_1_the_rate_goes_on_along_its_own_horizon(make: Callable[[int], dict[str, Any]]) -> None:
    """K1: the rate was reset, or the budget was added to the horizon once more."""
    storage, parts = MemoryStorage(), make(2048)
    lr_after(parts["schedule"], 1024)
    save(storage, parts, step=1024)
    again = make(2048)
    engine = restore(storage, again)
    assert engine.step == 1024
    schedule = again["schedule"]
    assert schedule.get_last_lr()[0] == pytest.approx(5e-4)
    assert lr_after(schedule, 256) == pytest.approx(3.75e-4)
    assert lr_after(schedule, 256) == pytest.approx(2.5e-4)
    assert lr_after(schedule, 512) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("make", [linear, closed_form])
def test_1_another_horizon_is_refused_unless_told(make: Callable[[int], dict[str, Any]]) -> None:
    storage, parts = MemoryStorage(), make(2048)
    lr_after(parts["schedule"], 1024)
    save(storage, parts, step=1024)
    with pytest.raises(ConfigError, match="schedule"):
        restore(storage, make(3072))
    again = make(3072)
    restore(storage, again, accept_changes=["schedule"])
    assert again["schedule"].last_epoch == 1024
    assert lr_after(again["schedule"], 2048) == pytest.approx(0.0, abs=1e-12) or make is closed_form


def test_2_exploration_goes_on_where_it_was() -> None:
    """K2: epsilon came back as 1."""

    def make() -> dict[str, Any]:
        return {"from": 1.0, "to": 0.05, "over": 1000, "step": 0}

    def epsilon(state: dict[str, Any]) -> float:
        part = min(state["step"] / state["over"], 1.0)
        return state["from"] + part * (state["to"] - state["from"])

    assert epsilon(saved_and_restored(make, lambda s: s.update(step=600))) == pytest.approx(0.43)


def count_to(engine: CheckpointEngine, stop: int, *, total: int = 1000) -> int:
    """Steps that were run; saves end before the step after them."""
    ran = 0
    for step in engine.steps(total):
        if step == stop + 1:
            break
        ran += 1
        engine._run.saver.wait(20)
    return ran


def test_3_a_step_that_is_reached_again_overwrites_nothing() -> None:
    storage = MemoryStorage()
    count_to(engine_over(storage, {"x": {"y": 0}}, save=every(steps=500)), 1000)
    damaged = "checkpoints/step-00001000-1/state.msgpack"
    storage.write_atomic(damaged, b"damaged")
    engine = engine_over(storage, {"x": {"y": 0}}, save=every(steps=500))
    assert count_to(engine, 1000) == 500
    assert storage.exists("checkpoints/step-00001000-2")
    assert storage.read("quarantine/step-00001000-1/state.msgpack") == b"damaged"


def test_5_only_what_is_left_of_the_total_is_run() -> None:
    storage = MemoryStorage()
    for stop, expected in ((900, 900), (1000, 100)):
        engine = engine_over(storage, {"x": {"y": 0}}, save=every(steps=100))
        assert count_to(engine, stop) == expected


def adaptive(lr: float, cached: float) -> dict[str, Any]:
    module = torch.nn.Linear(1, 1)
    return {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=lr),
        "adaptive": {"lr": cached},
    }


def test_7_a_cached_rate_that_disagrees_is_reported_and_set_right() -> None:
    """The first update after a resume used the cached rate."""
    storage = MemoryStorage()
    save(storage, adaptive(3e-4, 1e-3))
    parts, events = adaptive(1e-3, 1e-3), Events()
    engine = engine_over(storage, parts, events=events)
    engine.mirror("adaptive.lr", of="optimizer.lr")
    engine.start()
    engine.close()
    assert engine.restored_from is not None
    assert len(engine.restored_from.mismatches) == 1
    assert "adaptive.lr was 0.001" in events.warnings()[0]
    assert parts["optimizer"].param_groups[0]["lr"] == 3e-4
    assert parts["adaptive"]["lr"] == 3e-4


@pytest.mark.parametrize("wrong", ["nobody.lr", "adaptive.absent", "adaptive"])
def test_7_a_mirror_of_nothing_is_refused(wrong: str) -> None:
    storage = MemoryStorage()
    save(storage, adaptive(3e-4, 3e-4))
    engine = engine_over(storage, adaptive(3e-4, 3e-4))
    engine.mirror(wrong, of="optimizer.lr")
    with pytest.raises(ConfigError, match="no such value"):
        engine.start()


def test_7_a_schedule_that_disagrees_with_its_optimizer_is_reported() -> None:
    storage, parts = MemoryStorage(), linear(100)
    parts["optimizer"].param_groups[0]["lr"] = 5e-6
    save(storage, parts)
    engine = restore(storage, linear(100))
    assert engine.restored_from is not None
    assert "schedule says the rates are [0.001]" in engine.restored_from.mismatches[0]


def test_8_the_number_of_a_save_is_that_of_its_safe_point() -> None:
    """K16, 10: counters in the file were of another moment than the weights."""
    storage = MemoryStorage()
    parts = {"counters": {"samples": 0}, "weights": np.zeros(1)}
    engine = engine_over(storage, parts, save=every(steps=10_000), keep=9)
    for step in engine.steps(20):
        parts["counters"]["samples"] += 64
        if parts["counters"]["samples"] == 960:
            engine.save()
        parts["weights"] += 64
        if step == 16:
            break
    again = {"counters": {"samples": 0}, "weights": np.zeros(1)}
    assert restore(storage, again).step == 15
    assert again["counters"]["samples"] == again["weights"][0] == 960


# Adaptive scalars, optimizers, targets


def test_11_an_adaptive_coefficient_is_state() -> None:
    """K11: the coefficient was back at 0.2."""

    def halve(state: dict[str, float]) -> None:
        for _ in range(3):
            state["kl"] /= 2

    assert saved_and_restored(lambda: {"kl": 0.2}, halve)["kl"] == pytest.approx(0.025)


def test_13_moments_of_adam() -> None:
    """K9: without the moments the weight would be 0.9."""

    def make() -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.ones(1))
        return {"weight": weight, "optimizer": torch.optim.Adam([weight], lr=0.1)}

    def update(parts: dict[str, Any], gradient: float) -> None:
        parts["weight"].grad = torch.full((1,), gradient)
        parts["optimizer"].step()

    storage, parts = MemoryStorage(), make()
    for _ in range(10):
        update(parts, 1.0)
    with torch.no_grad():
        parts["weight"].fill_(1.0)
    save(storage, parts)
    again = make()
    restore(storage, again)
    assert again["optimizer"].param_groups[0]["params"][0] is again["weight"]
    update(again, 0.01)
    assert float(again["weight"].detach()) == pytest.approx(0.910229, abs=1e-6)


def test_14_a_target_network_keeps_its_distance() -> None:
    def make() -> dict[str, Any]:
        online, target = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        return {"online": online, "target": target}

    storage, parts = MemoryStorage(), make()
    torch.nn.init.constant_(parts["online"].weight, 2.0)
    torch.nn.init.constant_(parts["target"].weight, 1.0)
    save(storage, {"agent": parts})
    again = make()
    restore(storage, {"agent": again})
    with torch.no_grad():
        again["target"].weight.lerp_(again["online"].weight, 0.5)
    assert float(again["target"].weight.detach()) == 1.5


# Exactness


class Forgetful:
    """An environment whose pickle keeps what its constructor got and nothing else."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.s = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Forgetful, (self.size,)


class Pretending(Forgetful):
    """Says that it can load, and does not."""

    schema_version = 1

    def state(self) -> ComponentState:
        return ComponentState(values={"s": self.s})

    def load(self, state: ComponentState, schema_version: int) -> None:
        self.s = 0


def test_21_an_object_that_merely_pickles_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env: is a .*Forgetful.*nothing is pickled"):
        engine_over(MemoryStorage(), {"env": Forgetful(9)})


def test_21_a_part_that_did_not_take_its_state_back_is_not_called_restored() -> None:
    storage, env = MemoryStorage(), Pretending(9)
    env.s = 7
    save(storage, {"env": env})
    with pytest.raises(ConfigError, match="env after loading: .*s is 0 instead of 7"):
        restore(storage, {"env": Pretending(9)})


def test_20_a_window_of_returns_has_its_mean_at_once() -> None:
    window = saved_and_restored(lambda: deque(maxlen=100), lambda w: w.extend([10, 20, 30]))
    assert np.mean(window) == 20
    assert window.maxlen == 100


# Normalisers


def test_23_statistics_and_the_accumulator_come_back() -> None:
    """K8: fresh statistics left the observation at 5, and the accumulator at 0."""

    def make() -> dict[str, Any]:
        return {"mean": np.zeros(1), "var": np.ones(1), "count": 0, "returns": np.zeros(1)}

    def change(part: dict[str, Any]) -> None:
        part["mean"][:], part["var"][:], part["returns"][:], part["count"] = 3, 4, 7, 100

    part = saved_and_restored(make, change)
    assert (5 - part["mean"][0]) / math.sqrt(part["var"][0]) == 1.0
    assert part["returns"][0] == 7.0
    assert part["count"] == 100


# Replay


def add(ring: dict[str, Any], value: int) -> int:
    slot = ring["next"]
    ring["values"][slot] = value
    ring["next"] = (slot + 1) % 8
    ring["full"] = ring["full"] or ring["next"] == 0
    return slot


def test_28_a_full_ring_is_full() -> None:
    """K7: the ring believed that it held three."""

    def make() -> dict[str, Any]:
        return {"values": np.zeros(8, np.int64), "next": 0, "full": False}

    ring = saved_and_restored(make, lambda part: [add(part, value) for value in range(11)])
    assert ring["full"]
    assert ring["values"][ring["next"]] == 3
    assert add(ring, 11) == 3
    assert ring["values"][ring["next"]] == 4


def test_38_what_is_empty_stays_empty() -> None:
    assert saved_and_restored(list, lambda part: None) == []
    assert saved_and_restored(dict, lambda part: None) == {}


def test_41_items_do_not_multiply_with_restarts() -> None:
    """K13: three restarts made 800 of 100."""
    storage = MemoryStorage()
    save(storage, {"items": [np.full(1, index) for index in range(100)]})
    for total in range(2, 5):
        items = [np.full(1, index) for index in range(100)]
        engine = engine_over(storage, {"items": items})
        for _ in engine.steps(total, change_total=True):
            pass
        assert [int(item[0]) for item in items] == list(range(100))
    assert committed(storage)[-1] == 4


def test_35_a_warm_up_gate_sees_the_content() -> None:
    """K19: with an empty replay the gate passed by the counter."""
    replay = saved_and_restored(lambda: deque(maxlen=1000), lambda part: part.extend(range(450)))
    assert len(replay) == 450


def test_35_a_ring_in_segments_comes_back_or_starts_cold_on_purpose() -> None:
    def make() -> ReplayRing:
        return ReplayRing(1000, {"value": ("i8", ())})

    storage, replay = MemoryStorage(), make()
    engine = engine_over(storage, {"replay": replay}, save=every(steps=4))
    for step in engine.steps(9):
        engine._run.saver.wait(20)
        replay.append({"value": np.arange(50) + 50 * (step - 1)})
    again = make()
    restore(storage, {"replay": again})
    assert again.is_warm(450)
    drawn = [ring.sample(np.random.default_rng(1), 64)["value"] for ring in (replay, again)]
    np.testing.assert_array_equal(*drawn)
    cold = make()
    restore(storage, {"replay": cold}, cold=["replay"])
    assert not cold.is_warm(1)


def test_35_segments_are_stored_as_they_fill_not_only_when_saving() -> None:
    options = RingOptions(segment_bytes=8 * 20)
    storage, replay = MemoryStorage(), ReplayRing(1000, {"value": ("i8", ())}, options=options)
    engine = engine_over(storage, {"replay": replay}, save=every(steps=100))
    files: list[int] = []
    for _ in engine.steps(7):
        engine._run.saver.wait(20)
        files.append(len(storage.list("segments/replay")))
        replay.append({"value": np.arange(10)})
    assert files == [0, 0, 1, 1, 2, 2, 3]
    assert len(storage.list("segments/replay")) == 4


# Files, versions, kills


class Opaque:
    """An object with the two customary methods; may refuse."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.value = [0]
        self._refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"value": list(self.value), 7: "a key that is a number"}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        if self._refuses:
            raise KeyError("clip_range")
        assert state[7] == "a key that is a number"
        self.value = state["value"]


def test_44_an_entry_that_cannot_be_loaded_is_named() -> None:
    """K5: the entry silently took the object before it."""
    storage = MemoryStorage()
    one, two = Opaque(), Opaque()
    one.value, two.value = [1], [2]
    save(storage, {"one": one, "two": two})
    first, second = Opaque(), Opaque(refuses=True)
    with pytest.raises(ConfigError, match=r"component two.*KeyError: 'clip_range'"):
        restore(storage, {"one": first, "two": second})
    assert first.value == [1]
    assert second.value == [0]


def test_45_functions_are_not_data() -> None:
    with pytest.raises(ConfigError, match="schedules/clip: is a builtins"):
        engine_over(MemoryStorage(), {"schedules": {"clip": lambda progress: 0.2}})


def test_46_a_newest_checkpoint_that_was_cut_is_passed_over() -> None:
    storage = MemoryStorage()
    counters = {"x": 0}
    engine = engine_over(storage, {"counters": counters}, keep=9, save=every(steps=2))
    for step in engine.steps(4):
        engine._run.saver.wait(20)
        counters["x"] = step
    for file in ("manifest.json", "state.msgpack"):
        storage.write_atomic(f"checkpoints/step-00000004-1/{file}", b"")
    again, events = {"x": 0}, Events()
    found = restore(storage, {"counters": again}, events=events).restored_from
    assert found is not None
    assert (found.step, again["x"]) == (2, 2)
    assert "checkpoint_damaged" in events.names()


def test_49_a_restore_that_starts_anew_is_not_believed() -> None:
    """Every part is compared with what was stored after it was loaded."""

    class Ignores(Opaque):
        def load_state_dict(self, state: dict[Any, Any]) -> None:
            del state

    storage, old = MemoryStorage(), Ignores()
    old.value = [4]
    save(storage, {"policy": old})
    with pytest.raises(ConfigError, match="policy after loading"):
        restore(storage, {"policy": Ignores()})


def test_49_a_difference_that_is_meant_can_be_declared() -> None:
    storage = MemoryStorage()
    for value in (4, 0):
        env = Pretending(9)
        env.s = value
        engine = engine_over(storage, {})
        engine.add("env", env, exact=False)
        list(engine.steps(1))
    assert engine.restored_from is not None


def test_53_the_objects_of_the_caller_are_left_alone() -> None:
    """K18: saving put entries into the caller's dict."""
    parts = {"counters": {"x": [1]}, "array": np.arange(3)}
    before = {"counters": {"x": [1]}, "array": parts["array"]}
    save(MemoryStorage(), parts)
    assert parts["counters"] == before["counters"]
    assert parts["array"] is before["array"]


# Callbacks, logs


def test_52_the_best_result_is_state(tmp_path: Path) -> None:
    """K10: the best started at minus infinity, and a worse model replaced the best one."""
    best_file = tmp_path / "best.bin"

    def report(best: dict[str, Any], value: float, content: bytes) -> None:
        if value > best["value"]:
            best_file.write_bytes(content)
            best.update(value=value, hash=xxhash.xxh3_128_hexdigest(content))

    def make() -> dict[str, Any]:
        return {"value": -math.inf, "hash": ""}

    best = saved_and_restored(make, lambda part: report(part, 500.0, b"good"))
    report(best, 75.7, b"worse")
    assert best["value"] == 500.0
    assert xxhash.xxh3_128_hexdigest(best_file.read_bytes()) == best["hash"]


def test_54_evaluations_are_cut_back_to_the_restored_step() -> None:
    storage = MemoryStorage()
    evaluations: list[tuple[int, float]] = []
    engine = engine_over(storage, {"evaluations": evaluations}, save=every(steps=4))
    for step in engine.steps(8):
        engine._run.saver.wait(20)
        evaluations.append((step, step / 2))
        if step == 6:
            break
    again: list[tuple[int, float]] = []
    assert restore(storage, {"evaluations": again}).step == 4
    assert again == [(step, step / 2) for step in range(1, 5)]


# Settings that a script changed


def test_6_settings_of_an_optimizer_can_be_those_of_the_script() -> None:
    storage = MemoryStorage()
    save(storage, adaptive(3e-4, 0.0))
    parts = adaptive(5e-6, 0.0)
    restore(storage, parts)
    assert parts["optimizer"].param_groups[0]["lr"] == 3e-4
    parts = adaptive(5e-6, 0.0)
    restore(storage, parts, accept_changes=["optimizer"])
    assert parts["optimizer"].param_groups[0]["lr"] == 5e-6


def test_accepting_changes_of_nobody_is_refused() -> None:
    storage = MemoryStorage()
    save(storage, adaptive(3e-4, 0.0))
    with pytest.raises(ConfigError, match="did you mean 'optimizer'"):
        restore(storage, adaptive(5e-6, 0.0), accept_changes=["optimiser"])


def test_an_optimizer_of_unregistered_parameters_is_refused_by_name() -> None:
    module = torch.nn.Linear(2, 1)
    engine = engine_over(
        MemoryStorage(), {"optimizer": torch.optim.SGD(module.parameters(), lr=1.0)}
    )
    with pytest.raises(ConfigError, match=r"parameter 0 of group 0, of shape \(1, 2\)"):
        engine.start(1)
