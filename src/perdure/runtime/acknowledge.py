"""Waiting for the log, with a deadline."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from perdure.core.errors import StorageError
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
    await everything_acknowledged(store)
    return future.result(timeout=0)


async def everything_acknowledged(store: ExperienceStore) -> None:
    """Wait until all that was appended so far is durable. Raises as :func:`acknowledged`."""
    everything = asyncio.wrap_future(store.commit_all())
    try:
        await asyncio.wait_for(everything, ACKNOWLEDGE_TIMEOUT_S)
    except TimeoutError as error:
        raise StorageError(
            f"the experience log did not become durable within {ACKNOWLEDGE_TIMEOUT_S:g} s",
            where="log",
            rule="storage answers in time",
            way_out="check the disk, then resume the run; nothing acknowledged is lost",
        ) from error
    store.note_acknowledged()
