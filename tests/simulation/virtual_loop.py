"""An event loop in which time passes only when nothing else is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from perdure.core.clock import ManualClock

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everybody waits and no timer is set: nothing will ever happen again."""


class _NeverWaits(selectors.DefaultSelector):
    """Where a loop would sleep, the clock jumps."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock("every task waits, and for no timer")
            self._clock.advance(max(timeout, 0.0))
        return events


class Device(Executor):
    """A device that works for so many seconds at a time; ``seconds`` is asked for each call."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.seconds = seconds
        self.busy_s = 0.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is a manual clock's; what runs on a :class:`Device` takes its seconds."""

    def __init__(self, clock: ManualClock) -> None:
        self._virtual_clock = clock
        super().__init__(_NeverWaits(clock))

    def time(self) -> float:
        return self._virtual_clock.monotonic_s()

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        assert isinstance(executor, Device), "the simulation has no threads"
        seconds = executor.seconds()
        executor.busy_s += seconds
        result = func(*args)
        future: asyncio.Future[T] = self.create_future()

        def end() -> None:
            if not future.done():
                future.set_result(result)

        self.call_later(seconds, end)
        return future


def run_virtually(main: Coroutine[Any, Any, T], clock: ManualClock) -> T:
    """As ``asyncio.run``, on virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(main)
