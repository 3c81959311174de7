"""Saying what a start waits for, which may take minutes where everything is slow."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from perdure.core.clock import Clock
from perdure.core.events import EventSink

AGAIN_S = 30.0
"""Between two lines about one wait."""


@contextmanager
def waiting(what: str, *, clock: Clock, events: EventSink, at_once: bool = True) -> Generator[None]:
    """Say ``waiting`` every ``AGAIN_S`` until the body ends, from a thread of its own.

    Args:
        what: The body waits for.
        at_once: Also before the body begins.
    """
    over = threading.Event()
    began_s = clock.monotonic_s()

    def say_again() -> None:
        while not clock.wait(over, AGAIN_S):
            events("waiting", {"what": what, "seconds": clock.monotonic_s() - began_s})

    if at_once:
        events("waiting", {"what": what, "seconds": 0.0})
    with ThreadPoolExecutor(1, thread_name_prefix="perdure-waiting") as thread:
        saying = thread.submit(say_again)
        try:
            yield
        finally:
            over.set()
    saying.result()
