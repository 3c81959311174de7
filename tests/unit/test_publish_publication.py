"""Publications that go wrong half-way: who is left out, who comes back, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from pool_cases import RuleEngine, expected, request_of

from perdure.core.errors import StorageError, TrainingError
from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import Weights
from perdure.publish import InProcessTransport, Publication, PublicationOptions
from perdure.rollout import EnginePool

SOON_S = 0.05


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number)


def drive(
    engines: Mapping[str, RuleEngine],
    scenario: Callable[[EnginePool, Publication], Awaitable[Any]],
    transport: InProcessTransport | None = None,
) -> Any:
    """Version 1 is published; nothing may be left behind."""

    async def main() -> Any:
        pool = EnginePool(engines)
        publication = Publication(
            pool,
            transport or InProcessTransport(),
            options=PublicationOptions(acknowledge_timeout_s=SOON_S),
        )
        await publication.publish(version(1), weights={"digest": "d1"}, digest="d1")
        try:
            return await asyncio.wait_for(scenario(pool, publication), timeout=20)
        finally:
            await publication.close()
            await pool.close()
            assert asyncio.all_tasks() - {asyncio.current_task()} == set()

    return asyncio.run(main())


def states(pool: EnginePool) -> dict[str, str]:
    return {report.name: report.state.value for report in pool.describe()}


def test_the_order_for_each_engine() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")

    drive(engines, scenario)
    for engine in engines.values():
        assert engine.calls == [*["pause", "abort", "load_weights", "resume"] * 2, "close"]


@pytest.mark.parametrize("failure", ["digest", "error", "time", "death"])
def test_an_engine_that_does_not_acknowledge_is_left_out(failure: str) -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        bad = engines["a"]
        if failure == "digest":
            bad.wrong_digest = True
        elif failure == "error":
            bad.load_error = RuntimeError("out of memory")
        elif failure == "time":
            bad.answers.clear()
        else:
            bad.die()
        found = await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        assert found.engines == ("b",)
        if failure == "death":
            assert states(pool) == {"a": "lost", "b": "serving"}
        else:
            assert set(found.missing) == {"a"}
            assert states(pool) == {"a": "quarantined", "b": "serving"}
            assert pool.describe()[0].reason == found.missing["a"]
        for n in range(3):
            chunks = [chunk async for chunk in pool.generate(request_of(f"r{n}"))]
            assert {chunk.version for chunk in chunks} == {2}
        bad.answers.set()

    drive(engines, scenario)
    assert not engines["a"].requests
    assert len(engines["b"].requests) == 3


def test_a_late_engine_comes_back_when_it_acknowledges() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        engines["a"].answers.clear()
        await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        assert states(pool)["a"] == "quarantined"
        engines["a"].answers.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert states(pool)["a"] == "serving"
        assert engines["a"].version == 2

    drive(engines, scenario)


def test_an_engine_late_for_an_old_version_does_not_serve_it() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        engines["a"].answers.clear()
        await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        await publication.publish(version(3), weights={"digest": "d3"}, digest="d3")
        assert states(pool) == {"a": "quarantined", "b": "serving"}
        engines["a"].answers.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert (states(pool)["a"], engines["a"].version) == ("serving", 3)

    drive(engines, scenario)


def test_a_quarantined_engine_is_readmitted_by_the_next_publication() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        engines["a"].wrong_digest = True
        await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        assert not await publication.catch_up("a")
        engines["a"].wrong_digest = False
        found = await publication.publish(version(3), weights={"digest": "d3"}, digest="d3")
        assert found.engines == ("a", "b")

    drive(engines, scenario)


def test_a_cancelled_publication_leaves_no_load_behind() -> None:
    class SlowToStop(RuleEngine):
        async def load_weights(self, *args: Any, **options: Any) -> str:
            if self.version < 1:
                return await super().load_weights(*args, **options)
            try:
                return await asyncio.Event().wait() and ""
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        before = asyncio.all_tasks()
        new = publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        running = asyncio.create_task(new)
        await asyncio.sleep(SOON_S / 2)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert asyncio.all_tasks() == before

    drive({"a": SlowToStop()}, scenario)


def test_if_nobody_acknowledges_training_stops() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        engines["a"].wrong_digest = True
        engines["b"].load_error = RuntimeError("out of memory")
        with pytest.raises(TrainingError, match=r"a: .*wrong.*; b: out of memory"):
            await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        assert set(states(pool).values()) == {"quarantined"}

    drive(engines, scenario)


def test_weights_that_find_no_room_change_nothing() -> None:
    class Full(InProcessTransport):
        full = False

        async def lay_out(self, *args: Any, **named: Any) -> Weights:
            if self.full:
                raise StorageError("disk full")
            return await super().lay_out(*args, **named)

    engines = {"a": RuleEngine()}
    transport = Full()

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        transport.full = True
        with pytest.raises(StorageError):
            await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        assert (states(pool)["a"], publication.version) == ("serving", 1)

    drive(engines, scenario, transport)


def test_a_publication_in_the_middle_of_the_traffic() -> None:
    """Streams go on over it, each token under a version the engine had acknowledged."""
    engines = {name: RuleEngine() for name in "abc"}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        async def collect(name: str) -> list[Any]:
            return [chunk async for chunk in pool.generate(request_of(name, budget=40))]

        tasks = [asyncio.create_task(collect(f"r{n}")) for n in range(6)]
        for number in range(2, 6):
            for _ in range(15):
                await asyncio.sleep(0)
            digest = f"d{number}"
            await publication.publish(version(number), weights={"digest": digest}, digest=digest)
        for chunks in await asyncio.gather(*tasks):
            tokens = tuple(token for chunk in chunks for token in chunk.token_ids.tolist())
            assert tokens == expected(request_of(budget=40))
            versions = [chunk.version for chunk in chunks if len(chunk.token_ids)]
            assert versions == sorted(versions)
            assert len(set(versions)) > 1

    drive(engines, scenario)


def test_an_interrupted_pool_keeps_its_door_shut_over_a_publication() -> None:
    engines = {"a": RuleEngine()}

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        await pool.interrupt()
        stream = pool.generate(request_of())
        waiting = asyncio.create_task(anext(stream))
        await pool.sleep()
        await pool.wake()
        await publication.publish(version(2), weights={"digest": "d2"}, digest="d2")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert "resume" not in engines["a"].calls[5:]
        await pool.resume()
        assert (await waiting).version == 2
        await stream.aclose()

    drive(engines, scenario)


def test_a_version_is_announced_once_before_an_engine_serves_it() -> None:
    engines = {name: RuleEngine() for name in "ab"}
    serving: list[dict[str, str]] = []

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        engines["b"].answers.clear()
        await publication.publish(
            version(2),
            weights={"digest": "d2"},
            digest="d2",
            announce=lambda: serving.append(states(pool)),
        )
        assert states(pool) == {"a": "serving", "b": "quarantined"}
        engines["b"].answers.set()
        assert await publication.catch_up("b")

    drive(engines, scenario)
    assert [seen["a"] for seen in serving] == ["paused"]


def test_a_version_that_nobody_acknowledges_is_not_announced() -> None:
    engines = {"a": RuleEngine()}
    announced: list[int] = []

    async def scenario(pool: EnginePool, publication: Publication) -> None:
        del pool
        engines["a"].wrong_digest = True
        with pytest.raises(TrainingError, match="no engine acknowledged"):
            await publication.publish(
                version(2),
                weights={"digest": "d2"},
                digest="d2",
                announce=lambda: announced.append(2),
            )

    drive(engines, scenario)
    assert not announced
