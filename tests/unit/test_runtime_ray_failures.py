"""What the ray runtime makes of a store, an engine and a head that fail; no cluster is needed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    OwnerDiedError,
    RayError,
    RayTaskError,
)
from ray_cluster import QUIET

from perdure.core.clock import ManualClock
from perdure.core.errors import EngineLostError, InfrastructureError, StorageError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.models import ModelConfig
from perdure.rollout import EngineOptions
from perdure.runtime.ray import head, object_store, places, ray_engine
from perdure.runtime.ray.cluster import PoolPlan
from perdure.runtime.ray.head import watch_head
from perdure.runtime.ray.object_store import ObjectTransport
from perdure.runtime.ray.placement import Placement
from perdure.runtime.ray.ray_engine import RayEngine

pytestmark = [*QUIET]
MODEL = ModelConfig(
    vocab_size=5, hidden_size=4, layers=1, heads=1, kv_heads=1, head_dim=4, intermediate_size=4
)
OPTIONS = EngineOptions(slots=1, max_tokens=8)
FIRST = IncarnationNumber(1)


class LookedAt(ManualClock):
    """Each look at the head takes 0.2 s; counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0.0

    def monotonic_s(self) -> float:
        self.looks += 0.5
        self.advance(0.2)
        return super().monotonic_s()


async def watch(address: str, clock: LookedAt, *, interval_s: float) -> None:
    with pytest.raises(InfrastructureError, match=rf"{address} has not answered for 0\.99 s"):
        await watch_head(address, interval_s=interval_s, timeout_s=0.99, clock=clock)


def test_a_head_that_accepts_and_is_silent_is_told_after_the_looks_that_fill_the_time() -> None:
    clock = LookedAt()
    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(watch(f"127.0.0.1:{server.getsockname()[1]}", clock, interval_s=0.05))
    assert clock.looks == 4, "the pauses count as well"


def test_a_head_that_answers_in_between_has_all_the_time_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([True, *([False] * 4), True, *([False] * 5)])
    monkeypatch.setattr(head, "answers", lambda address, timeout_s: next(answers))
    clock = LookedAt()
    asyncio.run(watch("there:1", clock, interval_s=0.0))
    assert clock.looks == 11


async def a_head_that_answers(address: str, *, timeout_s: float) -> None:
    del address, timeout_s


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), OutOfDiskError("no disk")])
def test_a_store_that_takes_no_weights_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, error: RayError
) -> None:
    def refuse(value: object) -> None:
        raise error

    monkeypatch.setattr(ray, "put", refuse)

    async def lay_out(address: str) -> None:
        transport = ObjectTransport(head=address, timeout_s=5)
        weights = {"w": np.zeros(3, np.float32)}
        await transport.lay_out(PolicyVersion(1), weights, incarnation=FIRST)

    monkeypatch.setattr(object_store, "require_head", a_head_that_answers)
    with pytest.raises(StorageError) as refused:
        asyncio.run(lay_out("there:1"))
    assert str(error).splitlines()[0] in str(refused.value)
    assert "--object-store-memory" in str(refused.value)


class FakeActor:
    """Answers ``attach`` and ``ping`` as it is told."""

    def __init__(
        self, *, attach: Callable[[], Any] = lambda: True, ping: Callable[[], Any] = lambda: 0
    ) -> None:
        self.attach = _remote(attach)
        self.ping = _remote(ping)


def _remote(answer: Callable[[], Any]) -> SimpleNamespace:
    async def call() -> Any:
        result = answer()
        return await result if asyncio.isfuture(result) else result

    return SimpleNamespace(remote=lambda *arguments: call())


def raising(error: BaseException) -> Callable[[], Any]:
    def answer() -> None:
        raise error

    return answer


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Actors that were killed."""
    actors: list[object] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    return actors


def find(monkeypatch: pytest.MonkeyPatch, actor: FakeActor) -> None:
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)


def make(monkeypatch: pytest.MonkeyPatch, actor: FakeActor) -> None:
    def nobody(name: str, namespace: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", nobody)
    monkeypatch.setattr(ray_engine, "new_actor", lambda *arguments: actor)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ActorDiedError(), "died or cannot be reached"),
        (ActorUnavailableError("away", None), "died or cannot be reached"),
        (OwnerDiedError("00" * 28, b"", ""), "failed in Ray"),
        (RayTaskError("ping", "", OutOfDiskError("no disk"), ip="127.0.0.1"), "failed in Ray"),
        (RayTaskError("ping", "", KeyError("bug"), ip="127.0.0.1"), "cannot be watched: 'bug'"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("has_run", [True, False])
def test_an_engine_whose_sign_of_life_is_an_error_is_lost_and_killed_by_who_has_the_run(
    monkeypatch: pytest.MonkeyPatch,
    killed: list[object],
    error: BaseException,
    words: str,
    has_run: bool,
) -> None:
    actor = FakeActor(ping=raising(error))
    find(monkeypatch, actor)

    async def main() -> EngineLostError:
        engine = await RayEngine.start(
            MODEL, OPTIONS, Placement("e"), incarnation=FIRST, has_run=lambda: has_run
        )
        told = asyncio.get_running_loop().create_future()
        engine.on_loss(told.set_result)
        lost = await told
        await engine.close()
        return lost

    assert words in str(asyncio.run(main()))
    assert killed == ([actor] if has_run else [])


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize("made_here", [True, False])
def test_a_start_that_is_cancelled_kills_only_what_it_has_made_and_may_have(
    monkeypatch: pytest.MonkeyPatch, killed: list[object], made_here: bool, has_run: bool
) -> None:
    async def main() -> None:
        asked = asyncio.Event()

        def attach() -> asyncio.Future[bool]:
            asked.set()
            return asyncio.get_running_loop().create_future()

        actor = FakeActor(attach=attach)
        (make if made_here else find)(monkeypatch, actor)
        start = asyncio.create_task(
            RayEngine.start(
                MODEL, OPTIONS, Placement("e"), incarnation=FIRST, has_run=lambda: has_run
            )
        )
        await asked.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert killed == ([actor] if made_here and has_run else [])

    asyncio.run(main())


def test_places_that_cannot_be_marked_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head fails once, just after it has made the group."""
    group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "ab"))
    removed: list[object] = []

    def refuse(*_: object) -> None:
        raise OSError("the head is busy")

    def forget(*_: object) -> None:
        return None

    def none(*_: object) -> list[bytes]:
        return []

    marks = SimpleNamespace(internal_kv_put=refuse, internal_kv_keys=none, internal_kv_del=forget)
    monkeypatch.setattr(places, "_find", lambda name: None)
    monkeypatch.setattr(places, "_head", lambda: marks)
    monkeypatch.setattr(places, "placement_group", lambda bundles, **named: group)
    monkeypatch.setattr(places, "remove_placement_group", removed.append)
    plan = PoolPlan(engines=1)
    with pytest.raises(OSError, match="busy"):
        asyncio.run(places.reserve("run", plan, incarnation=FIRST, timeout_s=1.0))
    assert removed == [group]
