"""Tells whoever asks ``perdure status`` what the process at work knows and the log does not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from perdure.trainers.context import TrainContext

EVERY_S = 2.0
"""Between two refreshes, while the event loop has its turn."""
_SESSIONS_SHOWN = 5

LiveView = Callable[[Mapping[str, object]], None]


@contextmanager
def telling(ctx: TrainContext, tell: LiveView | None) -> Generator[None]:
    """Refresh the facts every ``EVERY_S`` for the length of the body, and once at its end.

    Consumes nothing; needs a running event loop. The timer ends with the body.
    """
    if tell is None:
        yield
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def refresh() -> None:
        nonlocal timer
        tell(live_facts(ctx))
        timer = loop.call_later(EVERY_S, refresh)

    refresh()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        tell({**live_facts(ctx), "ended": True})


def live_facts(ctx: TrainContext) -> dict[str, object]:
    """Facts of this moment as plain values; times in seconds."""
    sessions = ctx.runtime.running_sessions()
    silent = sorted(sessions, key=lambda one: -one.silent_s)[:_SESSIONS_SHOWN]
    return {
        "wall_s": ctx.clock.wall_s(),
        "every_s": EVERY_S,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "incarnation": int(ctx.store.incarnation),
        "ended": False,
        "global_step": ctx.progress.global_step,
        "local_updates": ctx.progress.local_updates,
        "activity": ctx.activity,
        "activity_s": ctx.clock.monotonic_s() - ctx.activity_since_s,
        "awaited_groups": ctx.awaited_groups,
        "generated_tokens": ctx.runtime.generated_tokens,
        "engines": [
            {**asdict(report), "state": report.state.value} for report in ctx.runtime.engines()
        ],
        "running_sessions": len(sessions),
        "silent_sessions": [
            {
                "group": int(one.session.group),
                "session": one.session.index,
                "doing": one.doing,
                "tokens": one.tokens,
                "running_s": one.running_s,
                "silent_s": one.silent_s,
            }
            for one in silent
        ],
    }
