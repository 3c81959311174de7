"""Time as a parameter: the system clock for runs, a manual one for tests and simulation."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. ``monotonic_s`` never goes back; ``wall_s`` counts from the epoch (UTC)."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until ``event`` is set or ``timeout_s`` have passed; return whether it is set."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)


class ManualClock:
    """A clock that moves only when told to; sleeping advances it."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError("a clock never goes back")
        with self._lock:
            self._now_s += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.advance(timeout_s)
        return event.is_set()
