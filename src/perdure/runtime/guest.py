"""A rollout engine on the learner's devices: in the pool while the learner has nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from perdure.core.errors import EngineLostError
from perdure.core.rollout_api import RolloutEngine
from perdure.publish import Publication
from perdure.rollout import EnginePool

GUEST = "learner"
"""Its name in the pool."""


class GuestEngine:
    """Joins the pool with the current weights and leaves it without losing a token.

    Built anew for each visit, so that it holds no memory while the learner works.

    Args:
        build: Makes the engine.
        slots: Requests that it decodes at once.
    """

    def __init__(
        self,
        pool: EnginePool,
        publication: Publication,
        *,
        build: Callable[[], RolloutEngine],
        slots: int,
    ) -> None:
        self.slots = slots
        self._pool = pool
        self._publication = publication
        self._build = build
        self._here = False

    async def join(self) -> bool:
        """Serve beside the other engines; False: it did not get the current weights."""
        assert not self._here
        self._pool.add(GUEST, self._build())
        self._here = True
        serves = await self._publication.catch_up(GUEST)
        if not serves:
            await self.leave()
        return serves

    async def leave(self) -> None:
        """Its requests go on elsewhere, from what they have; its memory is free. Idempotent."""
        if self._here:
            self._here = False
            # One that was lost has left already.
            with suppress(EngineLostError):
                await self._pool.drain(GUEST, timeout_s=0)
