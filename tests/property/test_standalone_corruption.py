"""Damage of every file of the newest checkpoint of a script: found, named, and the one before used.

Every trial starts the script again on a damaged copy of its run: what it goes on from is compared
value by value, and in the end it is as if nothing had happened.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from standalone_loops import Script

from perdure import every
from perdure.checkpoint import ReplayRing, RingOptions
from perdure.core.errors import DamagedError
from perdure.storage import MemoryStorage

STEPS, SAVED = 12, 8
OLD, NEW = f"step-{SAVED // 2:08d}-1", f"step-{SAVED:08d}-1"
KINDS = ("flip", "cut", "grow", "zero", "swap", "older", "missing", "several")
COUNTS = [100, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


class Damaged(Script):
    """The script of the other tests, with rows of a replay."""

    def __init__(self, storage: MemoryStorage) -> None:
        super().__init__(storage, save=every(steps=SAVED // 2, budget=1), keep=9)
        columns = {"x": ("i8", (64,))}
        self.ring = ReplayRing(60, columns, options=RingOptions(segment_bytes=4096))
        self.engine.register(ring=self.ring)

    def go_on(self, *, until: int = STEPS + 1) -> None:
        def each(step: int) -> bool:
            if step == until:
                return True
            numbers = np.arange(5) + 5 * (step - 1)
            self.ring.append({"x": np.repeat(numbers[:, None], 64, axis=1)})
            return False

        self.run(STEPS, each=each)

    def rows(self) -> list[int]:
        found = [row for block in self.ring.blocks() for row in block["x"]]
        assert all((row == row[0]).all() for row in found)
        return [int(row[0]) for row in found]


@pytest.fixture(scope="module")
def broken_off() -> MemoryStorage:
    """Two checkpoints; the segments of the newer one begin where those of the older one end."""
    storage = MemoryStorage()
    Damaged(storage).go_on(until=SAVED + 2)
    return storage


@pytest.fixture(scope="module")
def complete() -> tuple[Any, list[int]]:
    script = Damaged(MemoryStorage())
    script.go_on()
    return script.state(), script.rows()


def only_of_the_newest(storage: MemoryStorage) -> list[str]:
    """Its files, and the segments that the older one does not name."""
    manifests = {name: storage.read(f"checkpoints/{name}/manifest.json") for name in (OLD, NEW)}
    return [
        path
        for path in sorted(storage.files())
        if f"/{NEW}/" in path or (path.endswith(".seg") and path.encode() not in manifests[OLD])
    ]


def damage(storage: MemoryStorage, path: str, kind: str, rng: random.Random) -> None:
    data = storage.read(path)
    changed = bytearray(data)
    place = rng.randrange(len(data))
    if kind == "flip":
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del changed[place:]
    elif kind == "grow":
        changed += rng.randbytes(rng.randrange(1, 4096))
    elif kind == "zero":
        length = rng.randrange(1, 600)
        changed[place : place + length] = bytes(len(changed[place : place + length]))
    elif kind == "swap":
        others = [p for p in only_of_the_newest(storage) if storage.read(p) != data]
        changed[:] = storage.read(rng.choice(others))
    elif kind == "older":
        others = [p for p in storage.files() if f"/{OLD}/" in p and storage.read(p) != data]
        changed[:] = storage.read(rng.choice(others))
    if kind == "missing":
        storage.remove(path)
    elif changed != data:
        storage.damage(path, bytes(changed))
    else:
        # Zeros over zeros: something else.
        damage(storage, path, "flip", rng)


@pytest.mark.parametrize("trials", COUNTS)
def test_whatever_is_damaged_the_one_before_is_used(
    broken_off: MemoryStorage, complete: tuple[Any, list[int]], trials: int
) -> None:
    rng, found = random.Random(trials), Counter[str]()
    for trial in range(trials):
        storage = broken_off.process_kill()
        kind, paths = rng.choice(KINDS), only_of_the_newest(storage)
        for path in rng.sample(paths, 3 if kind == "several" else 1):
            damage(storage, path, "flip" if kind == "several" else kind, rng)
        found[resume(storage, what=f"trial {trial}: {kind} {paths}")] += 1
        again = Damaged(storage.open_as_new_process())
        again.go_on()
        assert (again.state(), again.rows()) == complete
    assert found.total() == trials
    assert found["when it was chosen"] > trials // 2
    assert found["when a row was read"] > trials // 50


def resume(storage: MemoryStorage, *, what: str) -> str:
    """Start again; when the damage was found. Rows are read as a learner would, at random."""
    script = Damaged(storage)
    try:
        script.engine.start()
        restored = script.engine.restored_from
        assert restored is not None, what
        if restored.step == SAVED:
            script.rows()
            raise AssertionError(f"{what} was not found")
    except DamagedError:
        script.engine.close()
        return "when a row was read"
    script.engine.close()
    assert restored.step == SAVED // 2, what
    assert [name for name, _ in restored.skipped] == [NEW], what
    assert script.counters["total"] == sum(range(SAVED // 2 + 1))
    assert script.rows() == list(range(5 * SAVED // 2))
    return "when it was chosen"
