"""What a script says wrongly is refused when it says it, in a sentence that names the way out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from standalone_loops import Gate, Script

from perdure import CheckpointEngine, every
from perdure.core.errors import ConfigError, StorageError
from perdure.core.faults import FaultPoint
from perdure.storage import MemoryStorage


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("allow_lagacy", True, "did you mean 'allow_legacy'"),
        ("keeep", 5, "did you mean 'keep'"),
        ("save", 2000, "every"),
        ("save", "10 min", "every"),
        ("keep", "3", "keep: is '3'"),
        ("keep", 2.5, "keep: is 2.5"),
        ("keep", 0, "keep: is 0"),
        ("arenas", 3, "checkpoint.arenas: is 3"),
        ("writer", "proces", "auto, process, thread"),
        ("grace_s", "30", "grace_s"),
        ("grace_s", -1, "grace_s"),
        ("grace_s", math.nan, "grace_s"),
        ("must_timeout_s", 0, "must_timeout_s"),
        ("must_timeout_s", "600", "must_timeout_s"),
        ("stall_timeout_s", math.inf, "stall_timeout_s"),
        ("stall_timeout_s", -1.0, "stall_timeout_s"),
        ("required", "policy", r"required=\['policy'\]"),
        ("cold", "replay", r"cold=\['replay'\]"),
        ("accept_changes", "opt", r"accept_changes=\['opt'\]"),
    ],
)
def test_an_option_is_refused_before_anything_is_opened(
    tmp_path: Path, option: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointEngine(tmp_path / "run", **{option: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": "10"},
        {"steps": 2.5},
        {"steps": True},
        {"minutes": "3"},
        {"steps": 1, "budget": []},
    ],
)
def test_a_trigger_is_a_number(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="number"):
        every(**wrong)


@pytest.mark.parametrize("total", ["10", 10.0, -3, True])
def test_a_total_is_a_whole_number(total: Any) -> None:
    script = Script(MemoryStorage())
    with pytest.raises(ConfigError, match="a whole number"):
        script.run(total)
    assert script.storage.files() == {}


def test_numbers_of_numpy_are_numbers() -> None:
    script = Script(MemoryStorage(), save=every(steps=np.int64(3)))  # type: ignore[arg-type]
    assert script.run(np.int32(7)) == 7  # type: ignore[arg-type]


def test_a_mirror_of_nothing_is_refused_at_the_first_start() -> None:
    script = Script(MemoryStorage())
    script.engine.mirror("limits.total", of="counters.total")
    with pytest.raises(ConfigError, match="there is no such value"):
        script.run()


def test_a_name_that_no_file_can_have_is_refused() -> None:
    script = Script(MemoryStorage())
    with pytest.raises(ConfigError, match="up to 200 between"):
        script.engine.add("x" * 201, {"n": 0})
    script.engine.add(f"{'x' * 200}/{'y' * 200}", {"n": 0})


@pytest.mark.parametrize(
    "fixed",
    [np.broadcast_to(np.float32(1), (3,)), torch.zeros(1).expand(3)],
    ids=["numpy", "torch"],
)
def test_what_nothing_can_be_copied_into_could_not_be_restored(fixed: Any) -> None:
    script = Script(MemoryStorage())
    with pytest.raises(ConfigError, match=r"component fixed.*read-only or expanded"):
        script.engine.register(fixed=fixed)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_inside_of_something_a_read_only_array_is_replaced(shape: tuple[int, ...]) -> None:
    storage = MemoryStorage()
    held = {"x": np.broadcast_to(np.float32(1), shape)}
    script = Script(storage)
    script.engine.register(held=held)
    script.run(2, each=lambda step: held.update(x=np.broadcast_to(np.float32(step), shape)))
    again = Script(storage)
    fresh = {"x": np.broadcast_to(np.float32(0), shape)}
    again.engine.register(held=fresh)
    again.run(2)
    np.testing.assert_array_equal(fresh["x"], np.full(shape, 2, np.float32))


def test_the_last_save_is_waited_for_as_long_as_the_script_says() -> None:
    gate = Gate(FaultPoint.CHECKPOINT_FILES_DURABLE)
    script = Script(MemoryStorage(), faults=gate, must_timeout_s=0.05, save=every(steps=100))
    with pytest.raises(StorageError, match=r"within 0\.05 s.*raise must_timeout_s"):
        script.run(3)
    gate.open()
