"""What a wait says of itself, by a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from perdure.core.clock import ManualClock
from perdure.runtime.waits import waiting


class Stepped(ManualClock):
    """Two waits pass at once, the third one waits for the event; tells when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.quiet = threading.Event()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.waits += 1
        if self.waits <= 2:
            return super().wait(event, timeout_s)
        self.quiet.set()
        return event.wait()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_wait_is_told_at_once_and_every_half_minute_until_it_is_over(at_once: bool) -> None:
    clock, told = Stepped(), list[object]()
    with waiting("3 CPUs", clock=clock, events=lambda *event: told.append(event), at_once=at_once):
        clock.quiet.wait()
    expected = [0.0, 30.0, 60.0] if at_once else [30.0, 60.0]
    assert told == [("waiting", {"what": "3 CPUs", "seconds": seconds}) for seconds in expected]


def test_a_wait_that_fails_fails_and_its_thread_ends() -> None:
    clock = Stepped()
    with (
        pytest.raises(ZeroDivisionError),
        waiting("it", clock=clock, events=lambda *event: None),
    ):
        raise ZeroDivisionError
    assert not [one for one in threading.enumerate() if "perdure-waiting" in one.name]


def test_an_event_that_nobody_can_write_down_is_not_lost() -> None:
    asked = threading.Event()

    def full(name: str, fields: dict[str, object]) -> None:
        asked.set()
        raise OSError("no space")

    with (
        pytest.raises(OSError, match="no space"),
        waiting("it", clock=Stepped(), events=full, at_once=False),
    ):
        asked.wait()
