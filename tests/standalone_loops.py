"""A small loop for tests of the engine alone: counted steps, a file system in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointEngine, every
from perdure.checkpoint import verify
from perdure.core.clock import ManualClock
from perdure.core.faults import FaultPoint
from perdure.experience import ExperienceState, read_experience
from perdure.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind

WAIT_S = 20.0


class StillClock(ManualClock):
    """Moves only when told to, also while the log's thread waits."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)


class Events:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        self.seen.append((name, dict(fields)))

    def names(self) -> list[str]:
        return [name for name, _ in self.seen]

    def warnings(self) -> list[str]:
        return [str(fields["message"]) for name, fields in self.seen if name == "warning"]


class Script:
    """One process of a script: parts made anew, an engine over them, a loop.

    The state after ``n`` steps is ``total == 1 + … + n`` in two places and ``n`` draws.
    """

    def __init__(self, storage: MemoryStorage, **options: Any) -> None:
        self.storage = storage
        self.events = Events()
        self.counters = {"total": 0}
        self.array = np.zeros(2)
        self.generator = np.random.default_rng(5)
        self.draws: list[float] = []
        options = {"save": every(steps=10), "events": self.events, "clock": StillClock()} | options
        self.engine = CheckpointEngine("run", storage=storage, **options)
        self.engine.register(counters=self.counters, array=self.array)
        self.engine.register(generator=self.generator, draws=self.draws)

    def run(
        self,
        total: int | None = 40,
        *,
        each: Callable[[int], object] = id,
        hurry: bool = False,
        **how: Any,
    ) -> int:
        """Run to the end, or until ``each`` raises or returns ``True``; returns completed steps.

        Saves end before the step after them, unless in a hurry.
        """
        for step in self.engine.steps(total, **how):
            if not hurry:
                self.wait()
            self.counters["total"] += step
            self.array += step
            self.draws.append(float(self.generator.random()))
            if each(step) is True:
                break
        return self.engine.step

    def wait(self) -> None:
        """Until no save is pending."""
        assert self.engine._run is not None
        assert self.engine._run.saver.wait(WAIT_S)

    def state(self) -> tuple[Any, ...]:
        return dict(self.counters), self.array.tolist(), list(self.draws)


def uninterrupted(total: int = 40) -> tuple[Any, ...]:
    script = Script(MemoryStorage())
    script.run(total)
    return script.state()


def committed(storage: MemoryStorage) -> list[int]:
    """Steps of the checkpoints that count, oldest first."""
    state, _ = read_log(storage)
    return [record.step for record in state.checkpoints]


def read_log(storage: MemoryStorage) -> tuple[ExperienceState, Any]:
    return read_experience(storage)


class Crash(Exception):
    """Something in the body of the loop."""


def crash_at(step: int) -> Any:
    def each(now: int) -> None:
        if now == step:
            raise Crash

    return each


def crashed(storage: MemoryStorage, step: int, **options: Any) -> Script:
    """A script whose body raised in ``step``."""
    script = Script(storage, **options)
    with pytest.raises(Crash):
        script.run(each=crash_at(step))
    return script


class Gate:
    """Holds the writing thread at one point until it is opened."""

    def __init__(self, point: FaultPoint) -> None:
        self._opened = threading.Event()
        self._point = point

    def open(self) -> None:
        self._opened.set()

    def reach(self, point: FaultPoint) -> None:
        if point is self._point:
            assert self._opened.wait(WAIT_S)


def full_at(directory: str) -> FaultyStorage:
    """A disk that is full when this checkpoint is written."""
    fault = StorageFault(StorageFaultKind.NO_SPACE, path_contains=directory)
    return FaultyStorage(MemoryStorage(), plan=[fault])


def manifest_of(storage: MemoryStorage) -> Any:
    def read(record: Any) -> Any:
        report = verify(storage, record.directory, manifest_digest=record.manifest_digest)
        assert report.ok
        return report.manifest

    return read
