"""How many sessions run at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from scenarios import Scenario
from sim_world import World

from perdure.core.rollout_api import GenerationChunk, GenerationRequest
from perdure.rollout import EnginePool

SLOTS = 12
SESSIONS = 4


class Counting:
    """The pool, and how many requests it had at once."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.now = self.most = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            async for chunk in self._pool.generate(request):
                yield chunk
        finally:
            self.now -= 1


class CountingWorld(World):
    def agent(self, pool: EnginePool) -> Counting:  # type: ignore[override]
        self.counting = Counting(pool)
        return self.counting


def test_no_more_sessions_run_than_engines_soon_have_room_for() -> None:
    limits: dict[str, object] = {"num_warmup_batches": 8}
    world = CountingWorld(
        Scenario(1, "colocate_async", ("trainer.train_batch_size=16",), limits=limits)
    )
    world.run()
    # Twice the slots; the last group is started as a whole.
    assert SLOTS < world.counting.most < 2 * SLOTS + SESSIONS
