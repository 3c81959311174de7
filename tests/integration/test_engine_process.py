"""Engines in processes of their own: real kills, stops and deaths of parents (spec C2, C3, F1)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.core import keyed_random
from perdure.core.errors import DamagedError, EngineLostError, FencedError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import (
    GenerationChunk,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    WeightFile,
)
from perdure.models import ModelConfig, Transformer, digest_weights, init_weights, weights_of
from perdure.publish import FileTransport, Publication
from perdure.rollout import (
    EmbeddedEngine,
    EngineOptions,
    EnginePool,
    ProcessEngine,
    ProcessOptions,
    Replacements,
)

MODEL = ModelConfig(
    vocab_size=13,
    hidden_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate_size=40,
    max_positions=256,
)
OPTIONS = EngineOptions(slots=4, max_tokens=256, chunk_tokens=4, deterministic=True)
SILENCE_S = 4.0
PROCESS = ProcessOptions(heartbeat_s=0.2, silence_timeout_s=SILENCE_S)
BUDGET = 200
ONE = PolicyVersion(1)
DEADLINE_S = 200.0
pytestmark = pytest.mark.timeout(300)


def model() -> Transformer:
    made = Transformer(MODEL)
    init_weights(made, 1)
    return made


WEIGHTS = weights_of(model())
NEWEST = IncarnationNumber(2)
"""Whoever publishes to the shared engine; it takes nothing of an older one."""
DIGEST = digest_weights(WEIGHTS)


def request_of(name: str, *, budget: int = BUDGET) -> GenerationRequest:
    number = int(name.removeprefix("r"))
    sampling = SamplingParams(max_new_tokens=budget)
    return GenerationRequest(name, (1, 2, 3, 1 + number % 9), sampling, (5, number))


async def collect(engine: RolloutEngine, request: GenerationRequest) -> list[GenerationChunk]:
    return [chunk async for chunk in engine.generate(request)]


def tokens_of(chunks: list[GenerationChunk]) -> list[int]:
    return np.concatenate([chunk.token_ids for chunk in chunks]).tolist()


def uninterrupted(names: list[str]) -> dict[str, list[GenerationChunk]]:
    """What an embedded engine answers when nothing happens."""

    async def main() -> dict[str, list[GenerationChunk]]:
        engine = EmbeddedEngine(MODEL, OPTIONS)
        await engine.load_weights(ONE, WEIGHTS)
        found = await asyncio.gather(*(collect(engine, request_of(name)) for name in names))
        await engine.close()
        return dict(zip(names, found, strict=True))

    return asyncio.run(main())


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main(), DEADLINE_S)

    return asyncio.run(bounded())


# --- one engine, shared by the tests that leave it as it was


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner) -> Iterator[ProcessEngine]:
    async def start() -> ProcessEngine:
        engine = await ProcessEngine.start(MODEL, OPTIONS, process_options=PROCESS)
        assert await engine.load_weights(ONE, WEIGHTS) == DIGEST
        return engine

    engine = runner.run(start())
    yield engine
    runner.run(engine.close())


def test_it_answers_as_the_embedded_engine_does(
    runner: asyncio.Runner, shared: ProcessEngine
) -> None:
    names = [f"r{n}" for n in range(6)]
    expected = uninterrupted(names)

    async def main() -> None:
        found = await asyncio.gather(*(collect(shared, request_of(name)) for name in names))
        for name, chunks in zip(names, found, strict=True):
            assert tokens_of(chunks) == tokens_of(expected[name])
            logprobs = [chunk.logprobs.tobytes() for chunk in chunks]
            assert b"".join(logprobs) == b"".join(c.logprobs.tobytes() for c in expected[name])
            assert [c.stop_reason for c in chunks][-1] is StopReason.LENGTH
            assert {chunk.version for chunk in chunks} == {ONE}
        assert shared.undelivered_tokens == 0

    runner.run(main())


def test_the_verbs_reach_it_in_order(runner: asyncio.Runner, shared: ProcessEngine) -> None:
    async def main() -> None:
        stream = shared.generate(request_of("r0"))
        head = [await anext(stream)]
        waiting = asyncio.create_task(collect(shared, request_of("r1")))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'r0' is live already"):
            await collect(shared, request_of("r0"))
        with pytest.raises(RuntimeError, match="decoding"):
            await shared.load_weights(ONE, WEIGHTS, incarnation=NEWEST)
        await shared.pause()
        assert await shared.abort() == 2
        head += [chunk async for chunk in stream]
        assert head[-1].stop_reason is StopReason.ABORTED
        assert (await waiting)[-1].stop_reason is StopReason.ABORTED
        await shared.resume()
        rest = replace(request_of("r0"), prefix_ids=tuple(tokens_of(head)))
        whole = tokens_of(head) + tokens_of(await collect(shared, rest))
        assert whole == tokens_of(await collect(shared, request_of("r0")))

    runner.run(main())


def test_a_reader_that_leaves_frees_the_slot(runner: asyncio.Runner, shared: ProcessEngine) -> None:
    async def main() -> None:
        for number in range(2 * OPTIONS.slots):
            stream = shared.generate(request_of(f"r{number}"))
            await anext(stream)
            await stream.aclose()
        await shared.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            await collect(shared, request_of("r0"))
        await shared.wake()
        assert await shared.load_weights(ONE, WEIGHTS, incarnation=NEWEST) == DIGEST
        assert len(tokens_of(await collect(shared, request_of("r0", budget=3)))) == 3
        assert shared.undelivered_tokens == 0

    runner.run(main())


def test_refusals_come_back_as_what_they_are(
    runner: asyncio.Runner, shared: ProcessEngine, tmp_path: Path
) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="request 'r0'"):
            await collect(shared, request_of("r0", budget=10_000))
        with pytest.raises(ValueError, match="weights do not fit"):
            await shared.load_weights(ONE, {}, incarnation=NEWEST)
        nothing = WeightFile(str(tmp_path / "none"), "00")
        with pytest.raises(DamagedError, match="cannot be read"):
            await shared.load_weights(ONE, nothing, incarnation=NEWEST)
        await shared.load_weights(ONE, WEIGHTS, incarnation=NEWEST)
        with pytest.raises(FencedError, match="serves incarnation 2"):
            await shared.load_weights(ONE, WEIGHTS, incarnation=IncarnationNumber(1))

    runner.run(main())


# --- pools of processes


@asynccontextmanager
async def pool_of(
    count: int, directory: Path
) -> AsyncIterator[tuple[EnginePool, dict[str, ProcessEngine], list[str]]]:
    """A pool of processes that serves version 1, and that replaces what it loses.

    Gives the pool, its engines as they are replaced, and the reasons of the losses.
    """
    engines: dict[str, ProcessEngine] = {}
    reasons: list[str] = []

    def note(name: str, fields: dict[str, object]) -> None:
        if name == "engine_lost":
            reasons.append(str(fields["reason"]))

    async def build(name: str) -> ProcessEngine:
        engines[name] = await ProcessEngine.start(MODEL, OPTIONS, process_options=PROCESS)
        return engines[name]

    names = [f"engine-{n}" for n in range(count)]
    pool = EnginePool(
        dict(zip(names, await asyncio.gather(*(build(name) for name in names)), strict=True))
    )
    publication = Publication(pool, FileTransport(directory), incarnation=IncarnationNumber(1))
    await publication.publish(ONE, weights=WEIGHTS, digest=DIGEST)
    replacements = Replacements(pool, build=build, catch_up=publication.catch_up, events=note)
    keeper = asyncio.create_task(replacements.run())
    try:
        yield pool, engines, reasons
    finally:
        keeper.cancel()
        await asyncio.wait([keeper])
        await publication.close()
        await pool.close()
        assert all(engine.pid is None or is_gone(engine.pid) for engine in engines.values())


def states(pool: EnginePool) -> dict[str, str]:
    return {report.name: report.state.value for report in pool.describe()}


async def until(holds: Callable[[], bool]) -> float:
    """Seconds until it holds. Other processes make it so, and tell nobody."""
    began_s = time.monotonic()
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return time.monotonic() - began_s


def is_gone(pid: int) -> bool:
    """Whether the process has ended (whoever is to wait for it may not have done so)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@dataclass(frozen=True, slots=True)
class Strike:
    engine: str
    signal: int
    after_tokens: int
    within_s: float
    reason: str


def kill(engine: str, after_tokens: int) -> Strike:
    return Strike(engine, signal.SIGKILL, after_tokens, 3.0, "died")


def stop(engine: str, after_tokens: int) -> Strike:
    within_s = 1.1 * SILENCE_S + 2.0
    return Strike(engine, signal.SIGSTOP, after_tokens, within_s, "gives no sign of life")


async def strike(
    pool: EnginePool, victim: ProcessEngine, plan: Strike
) -> tuple[dict[str, list[GenerationChunk]], float]:
    """Signal an engine in the middle of its answers; returns those, and seconds until noticed."""
    names = [f"r{n}" for n in range(8)]
    before = pool.counts.engines_lost
    tasks = {name: asyncio.create_task(collect(pool, request_of(name))) for name in names}
    target = victim.decoded_tokens + plan.after_tokens
    await until(lambda: victim.decoded_tokens >= target)
    assert victim.pid is not None
    os.kill(victim.pid, plan.signal)
    noticed_s = await until(lambda: pool.counts.engines_lost > before)
    return {name: await task for name, task in tasks.items()}, noticed_s


def check_answers(
    found: dict[str, list[GenerationChunk]], expected: dict[str, list[GenerationChunk]]
) -> None:
    for name, chunks in found.items():
        assert tokens_of(chunks) == tokens_of(expected[name])
        assert sum(chunk.stop_reason is not None for chunk in chunks) == 1
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        whole = np.concatenate([chunk.logprobs for chunk in expected[name]])
        np.testing.assert_allclose(logprobs, whole, atol=1e-5)


def strike_and_check(strikes: list[Strike], directory: Path) -> None:
    """Every answer is the uninterrupted one, at least 95 % of the tokens are not decoded again."""
    expected = uninterrupted([f"r{n}" for n in range(8)])

    async def main() -> None:
        async with pool_of(2, directory) as (pool, engines, reasons):
            for plan in strikes:
                await until(lambda: set(states(pool).values()) == {"serving"})
                victim = engines[plan.engine]
                assert victim.version == ONE
                decoded_before, lost_before = victim.decoded_tokens, pool.counts.tokens_lost
                found, noticed_s = await strike(pool, victim, plan)
                check_answers(found, expected)
                assert noticed_s < plan.within_s
                assert plan.reason in reasons[-1]
                lost = pool.counts.tokens_lost - lost_before
                assert lost <= 0.05 * (victim.decoded_tokens - decoded_before)
                assert is_gone(victim.pid or 0)
            assert len(reasons) == pool.counts.engines_lost == len(strikes)

    run(main)


def test_answers_survive_dead_and_wedged_engines(tmp_path: Path) -> None:
    strike_and_check([kill("engine-0", 600), stop("engine-1", 500)], tmp_path / "weights")


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_answers_survive_many_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE_S", 1100.0)
    moments = keyed_random.generator(3, "kill moments").integers(400, 700, 20).tolist()
    strikes = [
        (stop if number % 5 == 4 else kill)(f"engine-{number % 2}", moment)
        for number, moment in enumerate(moments)
    ]
    strike_and_check(strikes, tmp_path / "weights")


PARENT = """
import asyncio, os, signal
from perdure.models import ModelConfig
from perdure.rollout import EngineOptions, ProcessEngine

async def main():
    model = ModelConfig(vocab_size=5, hidden_size=4, layers=1, heads=1, intermediate_size=4)
    engine = await ProcessEngine.start(model, EngineOptions(slots=1, max_tokens=8))
    os.kill(engine.pid, signal.SIGSTOP)
    print(engine.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_an_engine_dies_with_its_parent_even_if_it_is_stopped() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline_s = time.monotonic() + 10
    while not is_gone(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert is_gone(pid)


def test_a_process_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    idle = tmp_path / "idle"
    idle.write_text("#!/bin/sh\nexec sleep 100\n")
    idle.chmod(0o755)

    async def main() -> None:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(EngineLostError, match="died"):
            await ProcessEngine.start(MODEL, OPTIONS)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
        with pytest.raises(EngineLostError, match="cannot be started.*absent"):
            await ProcessEngine.start(MODEL, OPTIONS)
        monkeypatch.setattr(sys, "executable", str(idle))
        with pytest.raises(EngineLostError, match=r"has not started for 0.2 s"):
            await ProcessEngine.start(
                MODEL, OPTIONS, process_options=ProcessOptions(start_timeout_s=0.2)
            )

    run(main)
