"""A script with many small parts: after ``n`` steps each holds its number plus ``n``."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure import CheckpointEngine, every


class GroupedScript:
    """``count`` arrays, of several types and shapes, some of them empty or without axes."""

    def __init__(self, storage: Any, count: int, *, per_rank: bool = False, **options: Any) -> None:
        types, shapes = ("f4", "f8", "i8"), ((3,), (), (0, 2), (2, 2))
        self.agents = {
            str(number): np.full(shapes[number % 4], number, types[number % 3])
            for number in range(count)
        }
        self.engine = CheckpointEngine(
            "run", storage=storage, save=every(steps=1, budget=1.0), **options
        )
        for name, one in self.agents.items():
            self.engine.add(f"agents/{name}", one, per_rank=per_rank)

    def run(self, total: int) -> GroupedScript:
        for _ in self.engine.steps(total, change_total=True):
            for one in self.agents.values():
                one += 1
        return self

    def holds(self, steps: int) -> bool:
        return all(np.all(one == int(name) + steps) for name, one in self.agents.items())
