"""Engines on a Ray cluster: same tokens, a killed one is left, and all outlive their controller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util import placement_group_table
from ray_cluster import QUIET

from perdure.core.errors import ConfigError, EngineLostError, FencedError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import GenerationRequest, RolloutEngine, SamplingParams
from perdure.models import ModelConfig, Transformer, digest_weights, init_weights, weights_of
from perdure.publish import Publication
from perdure.rollout import EmbeddedEngine, EngineOptions, EnginePool
from perdure.runtime.ray import placement
from perdure.runtime.ray.cluster import NAMESPACE, PoolPlan, join_cluster, joined
from perdure.runtime.ray.engine_actor import EngineHost
from perdure.runtime.ray.object_store import ObjectTransport
from perdure.runtime.ray.placement import Placement, new_actor
from perdure.runtime.ray.places import give_back, reserve
from perdure.runtime.ray.ray_engine import RayEngine

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("ray"),
    *QUIET,
]
T = TypeVar("T")

CONFIG = ModelConfig(
    vocab_size=32,
    max_positions=300,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate_size=32,
)
OPTIONS = EngineOptions(slots=4, max_tokens=300, chunk_tokens=4, deterministic=True)
PLAN = PoolPlan(engines=2)
FIRST, SECOND = IncarnationNumber(1), IncarnationNumber(2)


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[str]:
    """This process belongs to the cluster; gives its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with joined(PLAN, address=ray_address):
            yield ray_address


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(200):
            return await main()

    return asyncio.run(limited())


def model() -> Transformer:
    made = Transformer(CONFIG)
    init_weights(made, 1)
    return made


async def load(engine: RolloutEngine, *, incarnation: int = 1) -> str:
    weights = weights_of(model())
    number = IncarnationNumber(incarnation)
    return await engine.load_weights(PolicyVersion(1), weights, incarnation=number)


async def answer(engine: RolloutEngine, index: int = 0, tokens: int = 40) -> list[int]:
    request = GenerationRequest(
        f"r{index}", (1, 2, 3), SamplingParams(max_new_tokens=tokens), (1, index)
    )
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids.tolist()]


async def _until(true: Callable[[], Awaitable[object]]) -> None:
    while not await true():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


def _received(pool: EnginePool, tokens: int) -> Callable[[], Awaitable[bool]]:
    async def received() -> bool:
        return pool.counts.tokens_received >= tokens

    return received


def test_a_remote_engine_gives_the_tokens_of_an_embedded_one(cluster: str) -> None:
    async def main() -> None:
        engine = await RayEngine.start(CONFIG, OPTIONS, Placement("same-tokens"))
        embedded = EmbeddedEngine(CONFIG, OPTIONS)
        assert await load(engine) == await load(embedded) == digest_weights(weights_of(model()))
        assert await answer(engine) == await answer(embedded)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await answer(engine)

    run(main)


def test_verbs_and_refusals_come_across(cluster: str) -> None:
    async def main() -> None:
        engine = await RayEngine.start(CONFIG, OPTIONS, Placement("verbs"))
        await load(engine, incarnation=5)
        with pytest.raises(FencedError):
            await load(engine, incarnation=4)
        with pytest.raises(ValueError, match="exceed"):
            await answer(engine, tokens=10_000)
        running = asyncio.create_task(answer(engine, tokens=290))
        await _until(engine.abort)
        assert len(await running) < 290
        await engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            await answer(engine)
        await engine.wake()
        await load(engine, incarnation=5)
        assert len(await answer(engine, tokens=7)) == 7
        await engine.close()

    run(main)


def test_requests_of_a_killed_engine_go_on_elsewhere(cluster: str) -> None:
    async def main() -> None:
        engines = {
            name: await RayEngine.start(CONFIG, OPTIONS, Placement(name)) for name in ("one", "two")
        }
        pool = EnginePool(engines)
        weights = weights_of(model())
        publication = Publication(pool, ObjectTransport(head=cluster, timeout_s=5))
        await publication.publish(PolicyVersion(1), weights=weights, digest=digest_weights(weights))
        embedded = EmbeddedEngine(CONFIG, OPTIONS)
        await load(embedded)
        expected = await asyncio.gather(*(answer(embedded, i, 200) for i in range(4)))
        answers = [asyncio.create_task(answer(pool, i, 200)) for i in range(4)]
        await _until(_received(pool, 40))
        os.kill(await engines["one"].pid(), signal.SIGKILL)
        assert await asyncio.gather(*answers) == expected
        assert pool.counts.engines_lost == 1
        assert [report.name for report in pool.describe() if "died" in report.reason] == ["one"]
        await pool.close()

    run(main)


def test_an_engine_outlives_its_controller_and_serves_the_next(
    cluster: str, tmp_path: Path
) -> None:
    script = tmp_path / "controller.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import ray\n"
        "from test_ray_engines import CONFIG, OPTIONS, Placement, RayEngine, answer, load\n"
        f"ray.init({cluster!r}, namespace='perdure', log_to_driver=False)\n"
        "async def main():\n"
        "    engine = await RayEngine.start(CONFIG, OPTIONS, Placement('survivor'))\n"
        "    await load(engine, incarnation=3)\n"
        "    print(await engine.pid(), flush=True)\n"
        "    await answer(engine, 0, 290)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    controller = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        text=True,
    )
    assert controller.stdout is not None
    first_pid = int(controller.stdout.readline())
    controller.kill()
    controller.wait()
    controller.stdout.close()

    async def main() -> None:
        engine = await RayEngine.start(CONFIG, OPTIONS, Placement("survivor"))
        assert await engine.pid() == first_pid
        with pytest.raises(FencedError):
            await load(engine, incarnation=2)
        await load(engine, incarnation=4)
        assert len(await answer(engine, 0, 9)) == 9
        await engine.close()

    run(main)


def test_every_verb_of_an_earlier_controller_is_refused(cluster: str) -> None:
    async def main() -> None:
        place = Placement("verbs-of-two")
        old, new = [
            await RayEngine.start(CONFIG, OPTIONS, place, incarnation=IncarnationNumber(number))
            for number in (1, 2)
        ]
        await load(new, incarnation=2)
        for verb in (old.abort, old.pause, old.resume, old.sleep, old.wake, partial(load, old)):
            with pytest.raises(FencedError, match="belongs to incarnation 2"):
                await verb()
        with pytest.raises(FencedError, match="belongs to incarnation 2"):
            await answer(old)
        await old.close()
        assert old.is_anothers
        assert len(await answer(new, tokens=5)) == 5
        await new.close()

    run(main)


def test_giving_up_on_an_engine_that_was_there_does_not_end_it(cluster: str) -> None:
    """Nor does its silence, for a controller that may have been replaced."""

    async def main() -> None:
        place = Placement("slow", start_timeout_s=120, silence_timeout_s=1)
        first = await RayEngine.start(CONFIG, OPTIONS, place, incarnation=IncarnationNumber(1))
        await load(first)
        pid = await first.pid()
        lost: list[object] = []
        first.on_loss(lost.append)
        os.kill(pid, signal.SIGSTOP)
        try:
            hasty = replace(place, start_timeout_s=1)
            with pytest.raises(EngineLostError, match="has not started for 1 s"):
                await RayEngine.start(CONFIG, OPTIONS, hasty, incarnation=IncarnationNumber(1))
            await _until(lambda: _true(lost))
        finally:
            os.kill(pid, signal.SIGCONT)
        second = await RayEngine.start(CONFIG, OPTIONS, place, incarnation=IncarnationNumber(2))
        assert await second.pid() == pid
        await second.close()

    run(main)


def test_an_engine_that_hangs_is_ended_by_who_has_the_run(cluster: str) -> None:
    async def main() -> None:
        place = Placement("hung", silence_timeout_s=1)
        engine = await RayEngine.start(CONFIG, OPTIONS, place, has_run=lambda: True)
        pid = await engine.pid()
        os.kill(pid, signal.SIGSTOP)
        await _ended(pid)
        other = await RayEngine.start(CONFIG, OPTIONS, place, has_run=lambda: True)
        other_pid = await other.pid()
        assert other_pid != pid
        os.kill(other_pid, signal.SIGSTOP)
        await other.close()
        await _ended(other_pid)

    run(main)


def test_an_engine_ends_when_its_last_controller_has_been_silent_for_as_long_as_it_said(
    cluster: str,
) -> None:
    async def main() -> None:
        group = await reserve("run-orphan", PLAN, incarnation=FIRST, timeout_s=60)
        place = Placement("orphan", group=group, heartbeat_s=0.2)
        first = await RayEngine.start(CONFIG, OPTIONS, place, incarnation=FIRST)
        await first.leave()
        place = replace(place, orphan_timeout_s=1)
        second = await RayEngine.start(CONFIG, OPTIONS, place, incarnation=FIRST)
        assert second.was_there
        pid = await second.pid()
        await asyncio.sleep(3)
        assert await second.pid() == pid
        await second.leave()
        async with asyncio.timeout(30):
            await _ended(pid)
        assert states_of("perdure-run-orphan") == {"REMOVED"}

    run(main)


async def _true(value: object) -> bool:
    return bool(value)


async def _ended(pid: int) -> None:
    await _until(lambda: _true(not Path(f"/proc/{pid}").exists()))


def test_a_cluster_that_is_too_small_is_refused_at_once(cluster: str) -> None:
    with pytest.raises(ConfigError, match="99 CPUs are needed, the cluster has 8"):
        join_cluster(PoolPlan(engines=98))


def states_of(name: str) -> set[str]:
    groups = placement_group_table().values()
    return {group["state"] for group in groups if group["name"] == name}


def test_places_are_kept_for_the_next_controller_and_refused_to_others(cluster: str) -> None:
    async def main() -> None:
        plan = PoolPlan(engines=4)
        group = await reserve("run-a", plan, incarnation=FIRST, timeout_s=60)
        assert (await reserve("run-a", plan, incarnation=SECOND, timeout_s=60)).id == group.id
        with pytest.raises(ConfigError, match="no room for 5 CPUs"):
            await reserve("run-b", plan, incarnation=FIRST, timeout_s=2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await reserve("run-c", plan, incarnation=FIRST, timeout_s=60)
        assert states_of("perdure-run-c") == {"REMOVED"}
        await give_back(group, incarnation=SECOND)
        group = await reserve("run-b", plan, incarnation=FIRST, timeout_s=60)
        await give_back(group, incarnation=FIRST)

    run(main)


def test_places_of_a_higher_incarnation_are_neither_taken_nor_given_back(cluster: str) -> None:
    async def main() -> None:
        group = await reserve("run-d", PLAN, incarnation=SECOND, timeout_s=60)
        for plan in (PLAN, PoolPlan(engines=1)):
            with pytest.raises(FencedError, match="belong to incarnation 2"):
                await reserve("run-d", plan, incarnation=FIRST, timeout_s=60)
        await give_back(group, incarnation=FIRST)
        assert states_of("perdure-run-d") == {"CREATED"}
        await give_back(group, incarnation=SECOND)
        assert states_of("perdure-run-d") == {"REMOVED"}

    run(main)


def test_an_engine_that_slept_past_its_time_leaves_the_places_to_who_has_them_now(
    cluster: str,
) -> None:
    async def main() -> None:
        group = await reserve("run-e", PLAN, incarnation=FIRST, timeout_s=60)
        place = Placement("slept", group=group, heartbeat_s=0.2, orphan_timeout_s=6)
        engine = await RayEngine.start(CONFIG, OPTIONS, place, incarnation=FIRST)
        pid = await engine.pid()
        os.kill(pid, signal.SIGSTOP)
        await engine.leave()
        await reserve("run-e", PLAN, incarnation=SECOND, timeout_s=60)
        await asyncio.sleep(6)
        os.kill(pid, signal.SIGCONT)
        await _ended(pid)
        assert states_of("perdure-run-e") == {"CREATED"}
        await give_back(group, incarnation=SECOND)

    run(main)


def test_an_engine_whose_maker_dies_before_it_answers_ends(cluster: str) -> None:
    async def main() -> None:
        place = Placement("unclaimed", orphan_timeout_s=15)
        actor = new_actor(CONFIG, OPTIONS, place, FIRST)
        pid = await actor.pid.remote()
        await _ended(pid)

    run(main)


class HangingHost(EngineHost):
    """One of whose calls never returns."""

    async def hang(self) -> None:
        await asyncio.Event().wait()


def test_an_engine_that_is_asked_to_end_does_whatever_it_is_doing(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "EngineHost", HangingHost)

    async def main() -> None:
        busy = await RayEngine.start(CONFIG, OPTIONS, Placement("busy"), has_run=lambda: False)
        pid = await busy.pid()
        host: Any = ray.get_actor("busy", namespace=NAMESPACE)
        hanging = host.hang.remote()
        await busy.close()
        await _ended(pid)
        with pytest.raises(RayActorError):
            await hanging

    run(main)
