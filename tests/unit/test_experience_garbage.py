"""What reading a log leaves to the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import experience_records as make
import pytest

from perdure.core.clock import ManualClock
from perdure.core.faults import NoFaults
from perdure.experience import LogOptions, RunInfo, claim_experience, create_run, opening
from perdure.storage.memory import MemoryStorage


class Knot:
    """Garbage that only the collector finds, once it is tied."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def knot() -> Iterator[weakref.ref[Knot]]:
    """A young one. Nothing collects it but the test."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    yield weakref.ref(Knot())
    if was_on:
        gc.enable()


def _claim_a_short_log() -> None:
    storage = MemoryStorage()
    create_run(storage, RunInfo("5" * 32, 0.0))
    for _ in range(2):
        claimed = claim_experience(
            storage,
            clock=ManualClock(),
            faults=NoFaults(),
            options=LogOptions(threaded=False, tries=1),
        )
        store = claimed.start()
        store.submit([make.submitted(len(store.state.groups))])
        store.close("read again")


def test_garbage_from_before_a_short_log_was_read_stays_young(knot: weakref.ref[Knot]) -> None:
    _claim_a_short_log()
    gc.collect(1)
    assert knot() is None


def test_what_a_long_log_left_is_not_looked_at_at_once(
    knot: weakref.ref[Knot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_MANY_OBJECTS", 20)
    _claim_a_short_log()
    gc.collect(1)
    assert knot() is not None
    gc.collect()
    assert knot() is None
