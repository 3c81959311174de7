"""A thread changes the state at full speed while it is saved: no torn copy is ever committed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from perdure.checkpoint import (
    ArraysComponent,
    ChangeCounter,
    Checkpointer,
    CheckpointOptions,
    CheckpointReader,
    MemoryLedger,
    Registry,
    StagedInfo,
)
from perdure.checkpoint.verification import verify
from perdure.core.clock import SystemClock
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import MemoryStorage

ARRAYS, ELEMENTS = 6, 20_000
ONE = IncarnationNumber(1)


class Guarded(ArraysComponent):
    """Arrays that all hold the same number, except during a change."""

    def __init__(self) -> None:
        super().__init__({str(i): np.zeros(ELEMENTS) for i in range(ARRAYS)})
        self.counter = ChangeCounter()

    @property
    def state_version(self) -> int:
        return self.counter.value

    def change(self) -> None:
        with self.counter.changing():
            for array in self.arrays.values():
                np.add(array, 1, out=array)


@pytest.fixture
def fast_switching() -> Generator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def saved(component: Guarded, trials: int) -> tuple[Checkpointer, list[int], int]:
    """Stage so often while another thread changes the state, more often until something is saved.

    Returns the steps that were committed, and how many were tried.
    """
    storage, registry, ledger = MemoryStorage(), Registry(), MemoryLedger()
    registry.register("state", component, kind="tensors")
    engine = Checkpointer(
        storage,
        registry=registry,
        ledger=ledger,
        clock=SystemClock(),
        faults=NoFaults(),
        events=ignore_events,
        options=CheckpointOptions(keep=1),
    )
    stop = threading.Event()
    pause = threading.Event()

    def train() -> None:
        while not stop.is_set():
            component.change()
            # A short pause now and then, or hardly any copy would be whole.
            pause.wait(0.0005)

    trainer = threading.Thread(target=train)
    trainer.start()
    whole: list[int] = []
    try:
        for step in range(100 * trials):
            if step >= trials and whole:
                break
            info = StagedInfo(LogPosition(ONE, 0, step), {}, {}, "ppo", "", "")
            if engine.stage(CheckpointName("train", step, ONE), info=info):
                assert engine.wait(20)
                whole.append(step)
                check_whole(storage, ledger.committed()[-1].directory)
    finally:
        stop.set()
        trainer.join()
    engine.close()
    return engine, whole, step


def check_whole(storage: Any, directory: str) -> None:
    report = verify(storage, directory)
    assert report.ok
    assert report.manifest is not None
    arrays = CheckpointReader(storage, report.manifest).tensors("state")
    numbers = {float(value) for array in arrays.values() for value in (array.min(), array.max())}
    assert len(numbers) == 1, "parts of two states in one checkpoint"


@pytest.mark.usefixtures("fast_switching")
@pytest.mark.parametrize(
    "trials", [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_no_torn_copy_is_committed(trials: int) -> None:
    component = Guarded()
    engine, whole, tried = saved(component, trials)
    assert engine.torn + engine.skipped + len(whole) == tried
    assert engine.torn > trials // 100, "nothing was torn: the trial shows nothing"
    assert whole, "nothing was saved: the trial shows nothing"
