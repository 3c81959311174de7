"""The pool over engines that obey: who serves, what is sent again, what is given up."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from pool_cases import RuleEngine, expected, request_of

from perdure.core.errors import EngineLostError, TrainingError
from perdure.core.ids import PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationChunk, GenerationRequest
from perdure.rollout import EnginePool, PoolOptions
from perdure.rollout.members import TRANSITIONS, Member, MemberEvent, MemberState
from perdure.rollout.silence import SilenceWatch

ONE = PolicyVersion(1)
SOON_S = 0.05
"""Deadlines of these tests, where one is to expire."""


def drive(
    engines: dict[str, RuleEngine],
    scenario: Callable[[EnginePool], Awaitable[Any]],
    **options: float,
) -> Any:
    """Run a scenario on a pool whose engines hold version 1; nothing may be left behind."""

    async def main() -> Any:
        pool = EnginePool(engines, options=PoolOptions(**options))  # type: ignore[arg-type]
        await pool.load_weights(ONE, {"digest": "d1"})
        try:
            return await asyncio.wait_for(scenario(pool), timeout=20)
        finally:
            await pool.close()
            assert asyncio.all_tasks() - {asyncio.current_task()} == set()

    return asyncio.run(main())


async def collect(pool: EnginePool, request: GenerationRequest) -> list[GenerationChunk]:
    return [chunk async for chunk in pool.generate(request)]


def tokens_of(chunks: list[GenerationChunk]) -> tuple[int, ...]:
    assert all(chunk.stop_reason is None for chunk in chunks[:-1])
    return tuple(token for chunk in chunks for token in chunk.token_ids.tolist())


async def start(pool: EnginePool, request: GenerationRequest, chunks: int) -> Any:
    """A stream that has given so many chunks."""
    stream = pool.generate(request)
    return stream, [await anext(stream) for _ in range(chunks)]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def states(pool: EnginePool) -> dict[str, str]:
    return {report.name: report.state.value for report in pool.describe()}


def test_requests_spread_over_the_engines() -> None:
    engines = {name: RuleEngine(idle=True) for name in "abc"}

    async def scenario(pool: EnginePool) -> list[int]:
        tasks = [asyncio.create_task(collect(pool, request_of(f"r{n}"))) for n in range(6)]
        await turns()
        found = [report.in_flight for report in pool.describe()]
        for engine in engines.values():
            engine.flows.set()
        for chunks in await asyncio.gather(*tasks):
            assert tokens_of(chunks) == expected(request_of())
        assert [report.in_flight for report in pool.describe()] == [0, 0, 0]
        return found

    assert drive(engines, scenario) == [2, 2, 2]


def test_a_dead_engine_gets_no_traffic_and_its_request_goes_on() -> None:
    engines = {name: RuleEngine() for name in "ab"}
    request = request_of()
    untouched = copy.deepcopy(request)

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request, 4)
        engines["a"].die(undelivered=3)
        chunks += [chunk async for chunk in stream]
        assert states(pool) == {"a": "lost", "b": "serving"}
        assert tokens_of(await collect(pool, request_of("later"))) == expected(request)
        assert await pool.next_loss() == "a"
        counts = pool.counts
        assert (counts.engines_lost, counts.tokens_lost, counts.continuations) == (1, 3, 1)
        assert counts.tokens_received == 20
        return chunks

    assert tokens_of(drive(engines, scenario)) == expected(request)
    (again, _) = engines["b"].requests
    assert again.prefix_ids == expected(request)[:4]
    assert (again.random_key, again.sampling) == (request.random_key, request.sampling)
    assert len(engines["a"].requests) == 1
    assert engines["a"].calls[-1] == "close"
    assert request == untouched


def test_a_death_between_two_reads_loses_nothing_that_had_arrived() -> None:
    engines = {"a": RuleEngine(), "b": RuleEngine()}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request_of(), 2)
        engines["a"].die()
        await turns()
        return chunks + [chunk async for chunk in stream]

    assert tokens_of(drive(engines, scenario)) == expected(request_of())


def test_a_wedged_engine_is_found_and_left() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request_of(), 4)
        engines["a"].flows.clear()
        began_s = asyncio.get_running_loop().time()
        chunks += [chunk async for chunk in stream]
        assert asyncio.get_running_loop().time() - began_s < 20 * SOON_S
        (report, _) = pool.describe()
        assert report.state is MemberState.LOST
        assert "'a' has given no token for 0." in report.reason
        assert "silence_timeout_s" in report.reason
        return chunks

    found = drive(engines, scenario, silence_timeout_s=SOON_S)
    assert tokens_of(found) == expected(request_of())


def test_an_engine_nobody_waits_for_is_not_called_silent() -> None:
    engines = {"a": RuleEngine()}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request_of(), 2)
        await asyncio.sleep(5 * SOON_S)
        await pool.pause()
        engines["a"].flows.clear()
        rest = asyncio.create_task(collect_rest(stream))
        await asyncio.sleep(5 * SOON_S)
        assert states(pool) == {"a": "serving"}
        engines["a"].flows.set()
        return chunks + await rest

    found = drive(engines, scenario, silence_timeout_s=SOON_S)
    assert tokens_of(found) == expected(request_of())


async def collect_rest(stream: Any) -> list[GenerationChunk]:
    return [chunk async for chunk in stream]


def test_an_engine_that_does_not_answer_a_verb_is_lost() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> None:
        engines["a"].answers.clear()
        await pool.pause()
        assert states(pool) == {"a": "lost", "b": "serving"}
        assert "has not answered pause" in pool.describe()[0].reason
        engines["a"].answers.set()

    drive(engines, scenario, verb_timeout_s=SOON_S)


def test_one_that_does_not_answer_is_lost_beside_one_that_refuses() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> None:
        engines["a"].load_error = ValueError("other shapes")
        engines["b"].answers.clear()
        with pytest.raises(ValueError, match="other shapes"):
            await pool.load_weights(PolicyVersion(2), {"digest": "d2"})
        assert states(pool) == {"a": "serving", "b": "lost"}
        engines["b"].answers.set()

    drive(engines, scenario, verb_timeout_s=SOON_S)


def test_an_engine_admitted_while_the_door_opens_has_its_own_door_opened() -> None:
    engines = {"a": RuleEngine()}

    async def scenario(pool: EnginePool) -> None:
        await pool.pause()
        engines["a"].answers.clear()
        opening = asyncio.create_task(pool.resume())
        await turns()
        late = RuleEngine()
        pool.add("late", late)
        await pool.hold("late")
        await late.load_weights(ONE, {"digest": "d1"})
        await pool.admit("late")
        engines["a"].answers.set()
        await opening
        assert late.calls == ["pause", "abort", "load_weights", "resume"]

    drive(engines, scenario)


def test_a_stream_that_ends_badly_leaves_its_name_free() -> None:
    class Stuck(RuleEngine):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
            try:
                async for chunk in super().generate(request):
                    yield chunk
            finally:
                if len(self.requests) == 1:
                    raise OSError("the pipe is broken")

    engines = {"a": Stuck()}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, _ = await start(pool, request_of(), 1)
        with pytest.raises(OSError, match="pipe"):
            await stream.aclose()
        return await collect(pool, request_of())

    assert tokens_of(drive(engines, scenario)) == expected(request_of())


def test_streams_go_on_over_an_interruption() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> list[list[GenerationChunk]]:
        read, parts = await start(pool, request_of("read"), 3)
        tasks = [asyncio.create_task(collect(pool, request_of(f"r{n}"))) for n in range(4)]
        await turns(4)
        await pool.interrupt()
        assert [report.in_flight for report in pool.describe()] == [0, 0]
        await pool.sleep()
        late = asyncio.create_task(collect(pool, request_of("late")))
        await pool.wake()
        await pool.load_weights(PolicyVersion(2), {"digest": "d2"})
        await turns()
        assert not any(task.done() for task in [*tasks, late])
        await pool.resume()
        return [parts + await collect_rest(read), *await asyncio.gather(*tasks, late)]

    *interrupted, late = drive(engines, scenario)
    for chunks in interrupted:
        assert tokens_of(chunks) == expected(request_of())
        assert {chunk.version for chunk in chunks if len(chunk.token_ids)} == {1, 2}
    assert tokens_of(late) == expected(request_of())
    assert {chunk.version for chunk in late} == {2}


@pytest.mark.parametrize("lost_at", ["before", "pause", "abort", "sleep"])
def test_streams_wait_for_another_engine_if_theirs_is_lost_in_an_interruption(lost_at: str) -> None:
    class Fragile(RuleEngine):
        async def _answer(self, verb: str) -> None:
            if verb == lost_at:
                self.die()
                raise EngineLostError("the engine died", where="rule engine")
            await super()._answer(verb)

    engines: dict[str, RuleEngine] = {"a": Fragile()}
    late = RuleEngine()

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        read, parts = await start(pool, request_of("read"), 3)
        unread, _ = await start(pool, request_of("unread"), 1)
        if lost_at == "before":
            engines["a"].die()
        await pool.interrupt()
        await pool.sleep()
        assert await pool.next_loss() == "a"
        pool.add("a", late)
        await pool.wake()
        await pool.hold("a")
        await late.load_weights(PolicyVersion(2), {"digest": "d2"})
        await pool.admit("a")
        rest = asyncio.create_task(collect_rest(read))
        await turns()
        assert not late.requests
        await pool.resume()
        parts += await rest
        assert await pool.abort(["unread"]) == 1
        await collect_rest(unread)
        return parts

    assert tokens_of(drive(engines, scenario)) == expected(request_of())


def test_abort_ends_streams_with_engines_at_the_door_and_interrupted() -> None:
    engines = {"a": RuleEngine(idle=True)}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        inside = asyncio.create_task(collect(pool, request_of("inside")))
        await turns()
        await pool.interrupt()
        door = asyncio.create_task(collect(pool, request_of("door")))
        await turns()
        assert await pool.abort(["inside", "door", "unknown", "door"]) == 2
        found = await asyncio.gather(inside, door)
        await pool.resume()
        served = asyncio.create_task(collect(pool, request_of("served")))
        await turns()
        assert await pool.abort() == 1
        assert await pool.abort() == 0
        found.append(await served)
        return [chunks[-1] for chunks in found]

    last = drive(engines, scenario)
    assert [chunk.stop_reason for chunk in last] == [StopReason.ABORTED] * 3


def test_a_request_that_loses_its_last_engine_waits_for_another() -> None:
    engines = {"a": RuleEngine()}
    late = RuleEngine()

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request_of(), 4)
        engines["a"].die()
        rest = asyncio.create_task(collect_rest(stream))
        assert await pool.next_loss() == "a"
        pool.add("a", late)
        assert states(pool) == {"a": "quarantined"}
        await late.load_weights(ONE, {"digest": "d1"})
        await turns()
        assert not rest.done()
        await pool.admit("a")
        return chunks + await rest

    assert tokens_of(drive(engines, scenario)) == expected(request_of())
    assert late.requests[0].prefix_ids == expected(request_of())[:4]


def test_no_engine_in_time_is_an_error_that_names_everybody() -> None:
    engines = {"a": RuleEngine()}

    async def scenario(pool: EnginePool) -> EngineLostError:
        engines["a"].die()
        with pytest.raises(EngineLostError) as raised:
            await collect(pool, request_of("orphan"))
        return raised.value

    text = str(drive(engines, scenario, no_engine_timeout_s=SOON_S))
    for part in ("'orphan'", "0.05 s", "a lost", "the engine died", "no_engine_timeout_s"):
        assert part in text


def test_waiting_at_the_door_ends_too() -> None:
    async def scenario(pool: EnginePool) -> None:
        await pool.pause()
        with pytest.raises(EngineLostError, match=r"'r' has waited 0.05 s at the paused door"):
            await collect(pool, request_of())

    drive({"a": RuleEngine()}, scenario, door_timeout_s=SOON_S)


def test_a_request_that_kills_engines_is_given_up() -> None:
    engines = {name: RuleEngine(idle=True) for name in "abcde"}

    async def scenario(pool: EnginePool) -> None:
        task = asyncio.create_task(collect(pool, request_of("poison")))
        for engine in engines.values():
            await turns()
            if task.done():
                break
            engine.die()
        with pytest.raises(EngineLostError, match=r"'poison' got nowhere 3 times"):
            await task

    drive(engines, scenario, max_setbacks=2)
    assert [len(engine.requests) for engine in engines.values()] == [1, 1, 1, 0, 0]


def test_an_engine_that_aborts_by_itself_is_tried_again_but_not_for_ever() -> None:
    engines = {"a": RuleEngine(idle=True)}

    async def scenario(pool: EnginePool) -> None:
        task = asyncio.create_task(collect(pool, request_of()))
        while not task.done():
            await turns()
            await engines["a"].abort()
        with pytest.raises(EngineLostError, match="max_setbacks = 3"):
            await task

    drive(engines, scenario, max_setbacks=3)
    assert len(engines["a"].requests) == 4


def test_a_prefix_that_ends_needs_no_engine() -> None:
    request = request_of(budget=2)
    finished = GenerationRequest("r", (1,), request.sampling, (7,), prefix_ids=(100, 101))

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        await pool.pause()
        return await collect(pool, finished)

    engines = {"a": RuleEngine()}
    (chunk,) = drive(engines, scenario)
    assert (len(chunk.token_ids), chunk.stop_reason) == (0, StopReason.LENGTH)
    assert not engines["a"].requests


def test_a_drained_engine_finishes_what_it_has() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request_of(), 2)
        draining = asyncio.create_task(pool.drain("a", timeout_s=10))
        await turns(2)
        assert states(pool)["a"] == "draining"
        await collect(pool, request_of("elsewhere"))
        chunks += await collect_rest(stream)
        await draining
        assert states(pool) == {"b": "serving"}
        return chunks

    assert tokens_of(drive(engines, scenario)) == expected(request_of())
    assert [len(engine.requests) for engine in engines.values()] == [1, 1]
    assert engines["a"].calls[-1] == "close"


def test_what_a_draining_engine_does_not_finish_goes_on_elsewhere() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request_of(), 2)
        engines["a"].flows.clear()
        await pool.drain("a", timeout_s=SOON_S)
        return chunks + await collect_rest(stream)

    assert tokens_of(drive(engines, scenario)) == expected(request_of())
    assert engines["b"].requests[0].prefix_ids == expected(request_of())[:2]


def test_a_held_engine_hands_its_requests_over() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> list[GenerationChunk]:
        stream, chunks = await start(pool, request_of(), 2)
        await pool.hold("a")
        assert states(pool) == {"a": "paused", "b": "serving"}
        chunks += await collect_rest(stream)
        pool.quarantine("a", "holds the wrong bytes")
        assert pool.describe()[0].reason == "holds the wrong bytes"
        await pool.admit("a")
        assert states(pool)["a"] == "serving"
        return chunks

    assert tokens_of(drive(engines, scenario)) == expected(request_of())
    assert len(engines["b"].requests) == 1


def test_engines_that_disagree_about_their_weights_do_not_serve() -> None:
    engines = {name: RuleEngine() for name in "ab"}

    async def scenario(pool: EnginePool) -> None:
        engines["b"].wrong_digest = True
        with pytest.raises(TrainingError, match="different weights of version 2"):
            await pool.load_weights(PolicyVersion(2), {"digest": "d2"})
        assert states(pool) == {"a": "quarantined", "b": "quarantined"}

    drive(engines, scenario)


def test_names_are_unique_and_losses_told_once() -> None:
    engines = {"a": RuleEngine()}

    async def scenario(pool: EnginePool) -> None:
        with pytest.raises(ValueError, match="already"):
            pool.add("a", RuleEngine())
        engines["a"].die()
        engines["a"].die()
        assert await pool.next_loss() == "a"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.next_loss(), SOON_S)
        for call in (pool.hold("a"), pool.admit("a"), pool.drain("a", timeout_s=1)):
            with pytest.raises(EngineLostError, match="the engine died"):
                await call

    drive(engines, scenario)


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize("event", MemberEvent)
def test_every_transition_is_in_the_table_or_refused(
    state: MemberState, event: MemberEvent
) -> None:
    watch = SilenceWatch(1.0, on_silence=lambda _: None)
    member = Member("a", RuleEngine(), watch, state=state)
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(ValueError, match=f"is {state.value}: it cannot {event.value}"):
            member.apply(event)
        after = state
    else:
        member.apply(event)
    assert member.state is after
    lost_stays = state is not MemberState.LOST or after is MemberState.LOST
    assert lost_stays
