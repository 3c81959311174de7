"""Parts that are stored come back; those that could not are refused before the first save."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from standalone_loops import Events

from perdure import CheckpointEngine, every
from perdure.checkpoint import ArraysComponent
from perdure.core.errors import ConfigError
from perdure.storage import MemoryStorage


def engine_over(storage: MemoryStorage, **parts: Any) -> CheckpointEngine:
    save = every(steps=1, budget=1.0)
    engine = CheckpointEngine("run", storage=storage, save=save, events=Events())
    engine.register(**parts)
    return engine


def parameters() -> torch.nn.ParameterDict:
    return torch.nn.ParameterDict({"__metadata__": torch.nn.Parameter(torch.ones(2))})


@pytest.mark.parametrize(
    "part", [{"__metadata__": np.ones(2)}, parameters()], ids=["dict", "module"]
)
@pytest.mark.parametrize("others", [0, 40])
def test_the_name_that_safetensors_keeps_is_refused_before_anything_is_saved(
    part: Any, others: int
) -> None:
    storage = MemoryStorage()
    engine = engine_over(storage, policy=part)
    for number in range(others):
        engine.add(f"other/{number}", np.zeros(1))
    with pytest.raises(
        ConfigError, match="component policy: a tensor of it is called __metadata__"
    ):
        next(engine.steps(2))
    assert not storage.list("checkpoints")


def test_arrays_of_the_other_byte_order_come_back_into_the_live_ones() -> None:
    storage = MemoryStorage()
    for total in (2, 4):
        alone, inside = np.zeros(3, ">i4"), {"x": np.zeros((2, 2), ">f8")}
        named = {"y": np.zeros(2, ">u2")}
        engine = engine_over(storage, alone=alone, inside=inside, named=ArraysComponent(named))
        for _ in engine.steps(total, change_total=True):
            alone += 1
            inside["x"] += 0.5
            named["y"] += 300
        assert alone.tolist() == [total] * 3
        assert inside["x"].tolist() == [[total / 2] * 2] * 2
        assert named["y"].tolist() == [300 * total] * 2
        assert [alone.dtype, inside["x"].dtype, named["y"].dtype] == [">i4", ">f8", ">u2"]


def test_data_that_hold_themselves_or_go_too_deep_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["inner"] = {"outer": endless}
    deep = functools.reduce(lambda held, _: [held], range(5000), [])
    for part in (endless, deep):
        with pytest.raises(ConfigError, match="holds itself, or is nested too deeply"):
            engine_over(MemoryStorage(), part=part)
