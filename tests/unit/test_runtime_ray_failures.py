"""What the ray runtime makes of a store, an engine and a head that fail; no cluster is needed."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

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
    RpcError,
)
from ray_cluster import QUIET

from perdure.core.clock import ManualClock, SystemClock
from perdure.core.errors import (
    ConfigError,
    DamagedError,
    EngineLostError,
    InfrastructureError,
    StorageError,
)
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.models import ModelConfig
from perdure.rollout import EngineOptions
from perdure.runtime.ray import actors, head, object_store, places, ray_engine
from perdure.runtime.ray.actors import ActorOptions, EngineActors
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


class Head:
    """Keeps marks, or fails as it is told; tells how it was asked."""

    def __init__(
        self, keys: Sequence[bytes] = (), *, put: Exception | None = None, rest: Any = None
    ) -> None:
        self.keys = list(keys)
        self.put = put
        self.rest = rest
        self.timeouts: list[float] = []

    def internal_kv_put(self, key: bytes, *_: object, timeout: float) -> None:
        self._asked(timeout, self.put)
        self.keys.append(key)

    def internal_kv_keys(self, *_: object, timeout: float) -> list[bytes]:
        self._asked(timeout, self.rest)
        return self.keys

    def internal_kv_del(self, *_: object, timeout: float) -> None:
        self._asked(timeout, self.rest)

    def _asked(self, timeout: float, error: Exception | None) -> None:
        assert threading.current_thread() is not threading.main_thread(), "holds the event loop"
        self.timeouts.append(timeout)
        if error is not None:
            raise error


class Group(SimpleNamespace):
    """Places that never come."""

    def __init__(self) -> None:
        super().__init__(id=SimpleNamespace(hex=lambda: "ab"))

    async def ready(self) -> None:
        await asyncio.get_running_loop().create_future()


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Places that were given back."""
    groups: list[object] = []
    monkeypatch.setattr(places, "_find", lambda name: None)
    monkeypatch.setattr(places, "placement_group", lambda bundles, **named: Group())
    monkeypatch.setattr(places, "remove_placement_group", groups.append)
    return groups


def reserve(monkeypatch: pytest.MonkeyPatch, head: Head, *, timeout_s: float = 30.0) -> object:
    monkeypatch.setattr(places, "_head", lambda: head)
    plan = PoolPlan(engines=1)
    return asyncio.run(places.reserve("run", plan, incarnation=FIRST, timeout_s=timeout_s))


GONE = RpcError("Timed out while waiting for GCS")


def test_places_that_cannot_be_marked_are_free_again(
    monkeypatch: pytest.MonkeyPatch, removed: list[object]
) -> None:
    """The head fails once, just after it has made the group."""
    head = Head(put=OSError("the head is busy"))
    with pytest.raises(OSError, match="busy") as failed:
        reserve(monkeypatch, head)
    assert len(removed) == 1
    assert not hasattr(failed.value, "__notes__")
    assert len(head.timeouts) == 3
    assert all(0 < timeout <= 10 for timeout in head.timeouts)


def test_what_fails_first_is_raised_though_the_places_cannot_be_given_back(
    monkeypatch: pytest.MonkeyPatch, removed: list[object]
) -> None:
    with pytest.raises(OSError, match="busy") as failed:
        reserve(monkeypatch, Head(put=OSError("the head is busy"), rest=GONE))
    (note,) = failed.value.__notes__
    assert note.startswith("The places could not be given back: ray runtime: the head of")
    assert not removed


def test_a_head_that_goes_while_places_are_waited_for_does_not_hide_that_they_never_came(
    monkeypatch: pytest.MonkeyPatch, removed: list[object]
) -> None:
    head = Head()

    class Late(Group):
        async def ready(self) -> None:
            head.rest = GONE
            raise TimeoutError

    monkeypatch.setattr(places, "placement_group", lambda bundles, **named: Late())
    # Ray would end the process that asks a head that is gone.
    monkeypatch.setattr(ray, "available_resources", lambda: pytest.fail("the head was asked"))
    with pytest.raises(ConfigError, match=r"no room for 2 CPUs within 7 s; learner") as failed:
        reserve(monkeypatch, head, timeout_s=7.0)
    (note,) = failed.value.__notes__
    assert "Timed out while waiting for GCS" in note
    assert not removed


def test_a_head_that_does_not_answer_is_said_to_do_so(
    monkeypatch: pytest.MonkeyPatch, removed: list[object]
) -> None:
    with pytest.raises(InfrastructureError, match="the head of the cluster has not answered") as no:
        reserve(monkeypatch, Head(rest=GONE))
    assert "Timed out while waiting for GCS" in no.value.what
    assert "resume the run" in no.value.way_out
    assert no.value.__cause__ is GONE
    assert not removed


@pytest.mark.parametrize("mark", [b"x", b"", b"-1", b"1_0", b"\xb2"])
def test_a_mark_that_names_no_incarnation_is_damage(
    monkeypatch: pytest.MonkeyPatch, removed: list[object], mark: bytes
) -> None:
    with pytest.raises(DamagedError, match=r"mark .* of the places ab is no incarnation") as found:
        reserve(monkeypatch, Head([b"places/ab/" + mark]))
    assert "remove_placement_group" in found.value.way_out
    assert not removed, "whose they are is not known"


def test_a_head_that_is_slow_does_not_hold_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, removed: list[object]
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    class Slow(Head):
        def internal_kv_keys(self, *_: object, timeout: float) -> list[bytes]:
            turned = threading.Event()
            loops[0].call_soon_threadsafe(turned.set)
            assert turned.wait(60), "the event loop stands still"
            return super().internal_kv_keys(timeout=timeout)

    monkeypatch.setattr(places, "_head", Slow)

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await places.give_back(cast("Any", Group()), incarnation=FIRST)

    asyncio.run(main())
    assert len(removed) == 1


def test_places_that_cannot_be_given_back_at_the_end_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head goes between the look at it and the question."""
    told: list[tuple[str, dict[str, object]]] = []

    async def reserved(*_: object, **named: object) -> Group:
        return Group()

    async def refused(*_: object, **named: object) -> None:
        raise InfrastructureError("the head of the cluster has not answered")

    monkeypatch.setattr(actors, "head_address", lambda: "there:1")
    monkeypatch.setattr(actors, "require_head", a_head_that_answers)
    monkeypatch.setattr(actors, "answers", lambda address, timeout_s: True)
    monkeypatch.setattr(actors, "reserve", reserved)
    monkeypatch.setattr(actors, "give_back", refused)
    find(monkeypatch, FakeActor(attach=lambda: False))
    store = SimpleNamespace(run=SimpleNamespace(run_id="r"), incarnation=FIRST, is_highest=True)
    parts = SimpleNamespace(
        store=store, clock=SystemClock(), events=lambda name, fields: told.append((name, fields))
    )

    async def main() -> None:
        source = EngineActors(
            MODEL,
            OPTIONS,
            cast("Any", parts),
            names=["engine-0"],
            plan=PoolPlan(engines=1),
            settings=ActorOptions(1, 60, 1, 8, 60, 3600),
        )
        engine = await source.start("engine-0")
        await engine.leave()
        await source.close()

    asyncio.run(main())
    (message,) = [fields["message"] for name, fields in told if name == "warning"]
    assert str(message).startswith("the places on the cluster could not be given back: the head")
