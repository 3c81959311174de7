"""Lost engines are replaced within a budget; a busy event loop is no reason to lose one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pool_cases import RuleEngine, expected, request_of

from perdure.core.errors import EngineLostError, TrainingError
from perdure.core.ids import PolicyVersion
from perdure.publish import (
    Acknowledgements,
    InProcessTransport,
    Publication,
    PublicationOptions,
)
from perdure.rollout import EnginePool, ReplacementOptions, Replacements
from perdure.rollout.silence import SilenceWatch

ONE = PolicyVersion(1)
QUICK = ReplacementOptions(max_replacements=2, backoff_s=0.01)
Publish = Callable[[int], Awaitable[Acknowledgements]]


class Keeper:
    """Builds engines, some of which do not start, and notes the events.

    Attributes:
        held: Name of an engine that is built only when ``may_build`` is set.
    """

    def __init__(self) -> None:
        self.held = ""
        self.may_build = asyncio.Event()
        self.built: list[RuleEngine] = []
        self.failures = 0
        self.wrong_digests = False
        self.events: list[str] = []

    async def build(self, name: str) -> RuleEngine:
        if name == self.held:
            await self.may_build.wait()
        elif self.failures:
            self.failures -= 1
            raise EngineLostError(f"{name} does not start")
        self.built.append(RuleEngine())
        self.built[-1].wrong_digest = self.wrong_digests
        return self.built[-1]

    def note(self, name: str, fields: dict[str, object]) -> None:
        self.events.append(f"{name} {fields['engine']}")


def drive(scenario: Callable[[EnginePool, Keeper], Awaitable[Any]]) -> Keeper:
    """A pool of ``a`` and ``b`` that serves version 1 and replaces what it loses."""
    return drive_publishing(lambda pool, keeper, _: scenario(pool, keeper))


def drive_publishing(
    scenario: Callable[[EnginePool, Keeper, Publish], Awaitable[Any]],
) -> Keeper:
    """As :func:`drive`; the scenario may publish, by version."""
    keeper = Keeper()

    async def main() -> None:
        engines = {name: await keeper.build(name) for name in "ab"}
        pool = EnginePool(engines)
        publication = Publication(
            pool, InProcessTransport(), options=PublicationOptions(no_engine_timeout_s=1.0)
        )
        await publication.publish(ONE, weights={"digest": "d1"}, digest="d1")
        replacements = Replacements(
            pool,
            build=keeper.build,
            catch_up=publication.catch_up,
            options=QUICK,
            events=keeper.note,
        )
        running = asyncio.create_task(replacements.run())

        async def publish(version: int) -> Acknowledgements:
            digest = f"d{version}"
            return await publication.publish(
                PolicyVersion(version),
                weights={"digest": digest},
                digest=digest,
                nobody_comes=replacements.nobody_comes,
            )

        try:
            await asyncio.wait_for(scenario(pool, keeper, publish), 20)
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.wait([running])
            await publication.close()
            await pool.close()

    asyncio.run(main())
    return keeper


async def settle(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def states(pool: EnginePool) -> set[str]:
    return {report.state.value for report in pool.describe()}


def test_a_lost_engine_is_replaced_with_the_current_weights() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper) -> None:
        keeper.failures = 1
        keeper.built[0].die()
        await settle(lambda: states(pool) == {"serving"})
        assert keeper.built[2].version == ONE
        chunks = [chunk async for chunk in pool.generate(request_of())]
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected(
            request_of()
        )

    keeper = drive(scenario)
    assert keeper.events == ["engine_lost a", "engine_replaced a"]


def test_a_spent_budget_leaves_an_engine_lost_and_the_last_one_ends_it_all() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper) -> None:
        keeper.failures = 2
        keeper.built[0].die()
        await settle(lambda: "engine_not_replaced a" in keeper.events)
        assert states(pool) == {"lost", "serving"}
        keeper.failures = 2
        keeper.built[1].die()
        await settle(lambda: "engine_not_replaced b" in keeper.events)
        await asyncio.sleep(0.01)

    with pytest.raises(ExceptionGroup) as raised:
        drive(scenario)
    assert raised.group_contains(EngineLostError, match="the last engine, 'b'.*does not start")


def test_nothing_ends_while_another_engine_is_on_its_way_back() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper) -> None:
        keeper.held, keeper.failures = "b", 2
        keeper.built[0].die()
        keeper.built[1].die()
        await settle(lambda: "engine_not_replaced a" in keeper.events)
        assert states(pool) == {"lost"}
        keeper.may_build.set()
        await settle(lambda: states(pool) == {"lost", "serving"})

    assert drive(scenario).events[-1] == "engine_replaced b"


def test_an_engine_in_quarantine_is_asked_again_when_nobody_else_serves() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper) -> None:
        keeper.failures = 2
        pool.quarantine("b", "was late")
        keeper.built[0].die()
        await settle(lambda: "engine_not_replaced a" in keeper.events)
        assert states(pool) == {"lost", "serving"}
        chunks = [chunk async for chunk in pool.generate(request_of())]
        assert sum(len(chunk.token_ids) for chunk in chunks) == len(expected(request_of()))

    drive(scenario)


def test_engines_that_refuse_for_good_end_it_when_nobody_else_is_left() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper) -> None:
        keeper.failures = 2
        pool.quarantine("b", "was late")
        keeper.built[1].wrong_digest = True
        keeper.built[0].die()
        await settle(lambda: "engine_not_replaced a" in keeper.events)
        await asyncio.sleep(0.01)

    with pytest.raises(ExceptionGroup) as raised:
        drive(scenario)
    assert raised.group_contains(EngineLostError, match="the last engine, 'a'.*b quarantined")


def test_an_engine_that_comes_to_a_closed_pool_is_closed() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper) -> None:
        keeper.held = "b"
        keeper.built[1].die()
        await settle(lambda: keeper.events == ["engine_lost b"])
        await pool.close()
        keeper.may_build.set()
        await settle(lambda: len(keeper.built) == 3 and "close" in keeper.built[2].calls)

    with pytest.raises(ExceptionGroup) as raised:
        drive(scenario)
    assert raised.group_contains(RuntimeError, match="pool is closed")


def test_a_publication_that_finds_nobody_waits_for_the_replacement() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper, publish: Publish) -> None:
        keeper.held = "a"
        pool.quarantine("b", "was late")
        keeper.built[1].wrong_digest = True
        keeper.built[0].die()
        publishing = asyncio.ensure_future(publish(2))
        await settle(lambda: "load_weights" in keeper.built[1].calls[4:])
        assert not publishing.done()
        keeper.may_build.set()
        found = await publishing
        assert (found.version, found.engines) == (2, ("a",))
        assert set(found.missing) == {"b"}
        assert {r.name: r.version for r in pool.describe()}["a"] == 2

    drive_publishing(scenario)


def test_a_publication_is_refused_when_the_replacement_does_not_take_it_either() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper, publish: Publish) -> None:
        keeper.held = "a"
        keeper.built[1].wrong_digest = True
        keeper.built[0].die()
        publishing = asyncio.ensure_future(publish(2))
        await settle(lambda: "load_weights" in keeper.built[1].calls[4:])
        keeper.wrong_digests = True
        keeper.may_build.set()
        with pytest.raises(TrainingError, match="'b' holds digest"):
            await publishing

    drive_publishing(scenario)


def test_a_publication_waits_only_so_long_for_a_replacement() -> None:
    async def scenario(pool: EnginePool, keeper: Keeper, publish: Publish) -> None:
        keeper.held = "a"
        keeper.built[1].wrong_digest = True
        keeper.built[0].die()
        with pytest.raises(TrainingError, match="replacements: none has come for 1 s"):
            await publish(2)

    drive_publishing(scenario)


def test_what_ends_the_wait_for_a_replacement_is_told() -> None:
    async def breaks() -> None:
        raise RuntimeError("on the way")

    async def main() -> None:
        publication = Publication(EnginePool(), InProcessTransport())
        with pytest.raises(RuntimeError, match="on the way"):
            await publication.publish(ONE, weights={}, digest="d", nobody_comes=breaks)
        await publication.close()

    asyncio.run(main())


def test_silence_counts_only_while_the_event_loop_could_listen() -> None:
    found: list[float] = []

    async def main() -> None:
        watch = SilenceWatch(0.1, on_silence=found.append)
        watch.start()
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, watch.heard)
        time.sleep(0.3)  # noqa: ASYNC251 - the loop is busy, what was sent lies unread
        await asyncio.sleep(0.05)
        assert not found
        await asyncio.sleep(0.2)
        watch.stop()

    asyncio.run(main())
    (silent_s,) = found
    assert 0.1 <= silent_s < 0.25
