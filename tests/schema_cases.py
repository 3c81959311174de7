"""A script whose normaliser has changed twice, and the steps between its schema versions.

Version 1 stored a deviation, version 2 stores a variance, version 3 has a count beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perdure import CheckpointEngine, every
from perdure.checkpoint import Migrations, ReplayRing
from perdure.core.components import ComponentState

NAME = "agents/0/normaliser"
DEVIATION = np.array([1.0, 2.0, 3.0])

migrations = Migrations()
half = Migrations()
broken = Migrations()


@migrations.step("agents/*/normaliser", 1)
@half.step("agents/*/normaliser", 1)
def variance_in_place_of_deviation(state: ComponentState) -> ComponentState:
    tensors = dict(state.tensors)
    return ComponentState({"variance": tensors.pop("deviation") ** 2, **tensors}, state.values)


@migrations.step("agents/*/normaliser", 2)
def with_a_count(state: ComponentState) -> ComponentState:
    return ComponentState(state.tensors, {**state.values, "count": 0})


@broken.step(NAME, 1)
def asks_for_what_is_not_there(state: ComponentState) -> ComponentState:
    return ComponentState({"variance": state.tensors["variance"]})


class Normaliser:
    """A component of the script's own, as of one of its versions."""

    def __init__(self, version: int) -> None:
        self.schema_version = version
        self.tensors = {"deviation" if version == 1 else "variance": np.zeros(3)}
        self.values: dict[str, Any] = {"name": "x"} | ({"count": 7} if version == 3 else {})
        self.loaded: list[int] = []

    def state(self) -> ComponentState:
        return ComponentState(self.tensors, self.values)

    def load(self, state: ComponentState, schema_version: int) -> None:
        self.loaded.append(schema_version)
        if schema_version != self.schema_version or state.tensors.keys() != self.tensors.keys():
            raise ValueError(f"version {schema_version} with {sorted(state.tensors)}")
        for name, tensor in self.tensors.items():
            np.copyto(tensor, state.tensors[name])
        self.values |= state.values


def script(run: Path, version: int, *, steps: int, **options: Any) -> Normaliser:
    """The script as of a version; it adds one to its weights and to its replay every step."""
    engine = CheckpointEngine(run, save=every(steps=1), keep=9, **options)
    normaliser, weights = Normaliser(version), np.zeros(4, np.float32)
    replay = ReplayRing(100, {"x": ("f4", ())})
    engine.register(weights=weights, replay=replay, agents={"0": {"normaliser": normaliser}})
    for step in engine.steps(steps, change_total=True):
        weights += 1
        replay.append({"x": np.full(3, step, np.float32)})
        if version == 1:
            normaliser.tensors["deviation"][:] = DEVIATION
    assert weights[0] == steps
    rows = np.concatenate([block["x"] for block in replay.blocks()])
    assert rows.tolist() == [step for step in range(1, steps + 1) for _ in range(3)]
    return normaliser
