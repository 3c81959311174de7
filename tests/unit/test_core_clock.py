"""Clocks: the system's moves on its own, the manual one only when told to."""

from __future__ import annotations

import threading

import pytest

from perdure.core.clock import Clock, ManualClock, SystemClock


def test_the_system_clock_goes_forward() -> None:
    clock: Clock = SystemClock()
    first = clock.monotonic_s()
    clock.sleep(0.0)
    assert clock.monotonic_s() >= first
    assert clock.wall_s() > 1_700_000_000


def test_waiting_on_the_system_clock_says_whether_the_event_is_set() -> None:
    event = threading.Event()
    assert not SystemClock().wait(event, timeout_s=0.0)
    event.set()
    assert SystemClock().wait(event, timeout_s=60.0)


def test_the_manual_clock_moves_only_when_told() -> None:
    clock: Clock = ManualClock(start_s=5.0)
    assert clock.monotonic_s() == clock.wall_s() == 5.0
    clock.sleep(2.5)
    assert clock.monotonic_s() == clock.wall_s() == 7.5


def test_the_manual_clock_never_goes_back() -> None:
    with pytest.raises(ValueError, match="never goes back"):
        ManualClock().advance(-1.0)


def test_waiting_on_the_manual_clock_takes_the_time_out_unless_the_event_is_set() -> None:
    clock, event = ManualClock(start_s=0.0), threading.Event()
    assert not clock.wait(event, timeout_s=3.0)
    assert clock.monotonic_s() == 3.0
    event.set()
    assert clock.wait(event, timeout_s=3.0)
    assert clock.monotonic_s() == 3.0


def test_threads_may_advance_one_manual_clock() -> None:
    clock = ManualClock(start_s=0.0)
    threads = [
        threading.Thread(target=lambda: [clock.advance(1.0) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.monotonic_s() == 800.0
