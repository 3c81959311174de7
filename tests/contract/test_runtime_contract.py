"""What every runtime offers for engines outside the learner's process (``runtime.fleet``)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray_cluster import QUIET

from perdure.core.clock import SystemClock
from perdure.core.errors import FencedError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import GenerationRequest, RolloutEngine, SamplingParams
from perdure.models import ModelConfig, Transformer, digest_weights, init_weights, weights_of
from perdure.publish import Publication
from perdure.rollout import EmbeddedEngine, EngineOptions, EnginePool, ReplacementOptions
from perdure.runtime.fleet import EngineFleet, EngineSource
from perdure.runtime.parts import RuntimeParts
from perdure.trainers.config import RolloutConfig
from perdure.trainers.engine_processes import EngineProcesses

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("ray"), *QUIET]
MODEL = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate_size=24,
    tie_embeddings=True,
    max_positions=32,
)
OPTIONS = EngineOptions(slots=2, max_tokens=32, chunk_tokens=2)
VERSION = PolicyVersion(1)
Open = Callable[[int], EngineSource]
"""Gives the engines as an incarnation sees them."""


@pytest.fixture(params=("local", "ray"))
def source_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    if request.param == "local":
        rollout = RolloutConfig(engines=2)
        yield lambda _: EngineProcesses(MODEL, OPTIONS, rollout, 1, tmp_path)
        return
    address = request.getfixturevalue("ray_address")
    from perdure.runtime.ray.actors import ActorOptions, EngineActors
    from perdure.runtime.ray.cluster import PoolPlan, joined

    plan = PoolPlan(engines=2)
    settings = ActorOptions(
        threads=1,
        start_timeout_s=120,
        heartbeat_s=0.2,
        silence_timeout_s=20,
        place_timeout_s=60,
        orphan_timeout_s=600,
    )

    opened: list[int] = []

    def open_one(incarnation: int) -> EngineSource:
        names = ("engine-0", "engine-1")
        opened.append(incarnation)
        parts = parts_of(tmp_path.name, incarnation, opened)
        return EngineActors(MODEL, OPTIONS, parts, names=names, plan=plan, settings=settings)

    with joined(plan, address=address):
        yield open_one


class Store:
    """Of a run that has no log."""

    def __init__(self, run_id: str, incarnation: int, claimed: list[int]) -> None:
        self.run = SimpleNamespace(run_id=run_id)
        self.incarnation = IncarnationNumber(incarnation)
        self._claimed = claimed

    @property
    def is_highest(self) -> bool:
        return self.incarnation == max(self._claimed)


def parts_of(run_id: str, incarnation: int, claimed: list[int]) -> RuntimeParts:
    store = Store(run_id, incarnation, claimed)
    parts = SimpleNamespace(store=store, clock=SystemClock(), events=lambda name, fields: None)
    return cast("RuntimeParts", parts)


def run(main: Callable[[], Awaitable[Any]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200):
            await main()

    asyncio.run(limited())


def weights() -> dict[str, Any]:
    model = Transformer(MODEL)
    init_weights(model, 1)
    return weights_of(model)


async def publish(pool: EnginePool, source: EngineSource, *, incarnation: int) -> Publication:
    publication = Publication(pool, source.transport(), incarnation=IncarnationNumber(incarnation))
    found = await publication.publish(VERSION, weights=weights(), digest=digest_weights(weights()))
    assert found.missing == {}
    return publication


async def answer(engine: RolloutEngine, name: str = "r") -> list[int]:
    request = GenerationRequest(name, (1, 2, 3), SamplingParams(max_new_tokens=20), (4, 2))
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids.tolist()]


async def expected_answer() -> list[int]:
    embedded = EmbeddedEngine(MODEL, OPTIONS)
    await embedded.load_weights(VERSION, weights())
    return await answer(embedded)


async def pid_of(engine: Any) -> int:
    return engine.pid if isinstance(engine.pid, int) else await engine.pid()


def lives(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.02)


def test_engines_start_take_weights_answer_and_leave_nothing(source_of: Open) -> None:
    async def main() -> None:
        source, pool = source_of(1), EnginePool()
        for name in source.names:
            pool.add(name, await source.start(name))
        pids = [await pid_of(engine) for engine in pool.takers.values()]
        assert len(set(pids)) == 2
        publication = await publish(pool, source, incarnation=1)
        expected = await expected_answer()
        assert [await answer(engine) for engine in pool.takers.values()] == [expected, expected]
        await pool.close()
        await publication.close()
        await source.close()
        await until(lambda: not any(map(lives, pids)))

    run(main)


def test_a_killed_engine_is_replaced_and_serves_the_same_weights(source_of: Open) -> None:
    async def main() -> None:
        source, pool = source_of(1), EnginePool()
        told: list[str] = []
        publication = Publication(pool, source.transport(), incarnation=IncarnationNumber(1))
        fleet = EngineFleet(
            pool,
            publication,
            source=source,
            options=ReplacementOptions(),
            events=lambda name, fields: told.append(name),
        )
        async with fleet.running():
            await fleet.ready()
            digest = digest_weights(weights())
            await publication.publish(VERSION, weights=weights(), digest=digest)
            await pool.resume()
            victim = await pid_of(pool.takers["engine-0"])
            os.kill(victim, signal.SIGKILL)
            await until(lambda: "engine_replaced" in told)
            assert told == ["engine_lost", "engine_replaced"]
            assert await pid_of(pool.takers["engine-0"]) != victim
            assert {report.state.value for report in pool.describe()} == {"serving"}
            assert await answer(pool.takers["engine-0"]) == await expected_answer()
        await pool.close()
        await publication.close()
        await source.close()

    run(main)


def test_who_comes_later_has_the_engine_and_who_was_before_does_not(source_of: Open) -> None:
    """Found again or made anew; the earlier one is refused, or has nothing any more."""

    async def main() -> None:
        first, second = source_of(1), source_of(2)
        old = await first.start("engine-0")
        await old.load_weights(VERSION, weights(), incarnation=IncarnationNumber(1))
        if isinstance(first, EngineProcesses):
            await old.close()
        new = await second.start("engine-0")
        digest = await new.load_weights(VERSION, weights(), incarnation=IncarnationNumber(2))
        assert digest == digest_weights(weights())
        with pytest.raises((FencedError, RuntimeError)):
            await old.load_weights(VERSION, weights(), incarnation=IncarnationNumber(1))
        await old.close()
        await first.close()
        assert await answer(new) == await expected_answer()
        await new.close()
        await second.close()

    run(main)


@pytest.mark.parametrize("source_of", ["ray"], indirect=True)
def test_who_is_refused_takes_nothing_from_who_has_the_engine(source_of: Open) -> None:
    """Whoever was there first, and whatever became of the engines it had."""

    async def main() -> None:
        first = source_of(1)
        lost = await first.start("engine-1")
        second = source_of(2)
        new = await second.start("engine-0")
        await new.load_weights(VERSION, weights(), incarnation=IncarnationNumber(2))
        with pytest.raises(FencedError):
            await first.start("engine-0")
        told: list[object] = []
        lost.on_loss(told.append)
        os.kill(await pid_of(lost), signal.SIGKILL)
        await until(lambda: bool(told))
        await lost.close()
        await first.close()
        assert await answer(new) == await expected_answer()
        await new.close()
        await second.close()

    run(main)


@pytest.mark.parametrize("source_of", ["ray"], indirect=True)
def test_who_has_lost_all_engines_keeps_off_the_places_of_who_came_later(source_of: Open) -> None:
    async def main() -> None:
        first = source_of(1)
        lost = await first.start("engine-0")
        os.kill(await pid_of(lost), signal.SIGKILL)
        second = source_of(2)
        new = await second.start("engine-0")
        await new.load_weights(VERSION, weights(), incarnation=IncarnationNumber(2))
        await lost.close()
        await first.close()
        assert await answer(new) == await expected_answer()
        await new.close()
        await second.close()

    run(main)


def test_what_is_found_again_keeps_the_same_weights_and_takes_others(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.runtime.ray import ray_engine
    from perdure.runtime.ray.cluster import PoolPlan, joined
    from perdure.runtime.ray.placement import Placement

    place = Placement(tmp_path.name)

    sent: list[object] = []

    async def main() -> None:
        for incarnation, is_sent in ((1, True), (2, False), (3, True)):
            number = IncarnationNumber(incarnation)
            engine = await ray_engine.RayEngine.start(MODEL, OPTIONS, place, incarnation=number)
            assert engine.was_there is (incarnation > 1)
            given = {name: tensor.clone() for name, tensor in weights().items()}
            if incarnation == 3:
                next(iter(given.values())).add_(1)
            sent.clear()
            version = PolicyVersion(incarnation)
            digest = await engine.load_weights(version, given, incarnation=number)
            assert digest == digest_weights(given)
            assert bool(sent) is is_sent
            if incarnation < 3:
                await engine.leave()
        await engine.close()

    def send(weights: Any) -> Any:
        sent.append(weights)
        return stored(weights)

    stored = ray_engine.stored_weights
    monkeypatch.setattr(ray_engine, "stored_weights", send)
    with joined(PoolPlan(engines=1), address=ray_address):
        run(main)
