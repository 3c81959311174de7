"""Waiting for the log, with a deadline."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from perdure.core.ids import LogPosition
from perdure.experience import ExperienceStore

ACKNOWLEDGE_TIMEOUT_S = 300.0
"""Longest wait for the disk before a step gives up with a clear error."""


async def acknowledged(store: ExperienceStore, future: Future[LogPosition]) -> LogPosition:
    """Wait until an append and all before it are durable, without lingering.

    Raises:
        FencedError, StorageError: As the log says; also if it takes longer than
            ``ACKNOWLEDGE_TIMEOUT_S``.
    """
    await asyncio.to_thread(store.flush, ACKNOWLEDGE_TIMEOUT_S)
    return future.result(timeout=0)
