"""The remote tier against a real S3 server on loopback, through a proxy that breaks requests."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fault_proxy import Fault, FaultProxy
from object_servers import S3Server, new_prefix, s3_objects, s3_server
from tier_cases import OPTIONS, Said, TieredRun, context, experience_of, resumed_elsewhere

from perdure.checkpoint.tier import RemoteTier, RetryPolicy, TierStatus, pull, read_head
from perdure.core.clock import SystemClock
from perdure.core.keyed_random import generator
from perdure.storage import MemoryStorage

LIVE = dataclasses.replace(
    OPTIONS,
    log_ship_s=0.1,
    poll_s=0.05,
    retry=RetryPolicy(attempts=3, first_delay_s=0.01, longest_delay_s=0.05),
)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def wait_until(tier: RemoteTier, there: Callable[[TierStatus], bool]) -> TierStatus:
    deadline = time.monotonic() + DEADLINE_S
    while not there(tier.status()):
        assert time.monotonic() < deadline, tier.status()
        time.sleep(0.02)
    return tier.status()


def test_a_run_is_shipped_while_it_trains_and_goes_on_elsewhere(server: S3Server) -> None:
    objects = s3_objects(server.url, new_prefix())
    run = TieredRun(MemoryStorage(), clock=SystemClock())
    said = Said()
    tier = run.tier(objects, options=LIVE, events=said)
    for _ in range(3):
        newest = run.train_and_save()
    wait_until(tier, lambda status: status.checkpoint == newest)
    run.train()
    wait_until(tier, lambda status: not status.behind_log_bytes)
    status = tier.close()
    assert (status.last_error, status.exposure_s, status.behind_checkpoints) == ("", 0.0, 0)
    assert {"log_shipped", "checkpoint_shipped"} <= set(said.names())
    other = resumed_elsewhere(objects)
    assert (other.restored_step, other.step) == (3, 4)
    again = TieredRun(run.storage, take_over=True)
    assert experience_of(other) == experience_of(again)


@pytest.mark.parametrize("seed", range(3))
def test_a_flaky_store_delays_and_changes_nothing(server: S3Server, seed: int) -> None:
    """Every third request or so fails in some way, there and back."""
    lasting = (Fault.BLACK_HOLE, Fault.FORBIDDEN, Fault.SHORT, Fault.FLIPPED)
    kinds = [fault for fault in Fault if fault not in lasting]
    draws = generator(seed, "flaky store")
    lock = threading.Lock()

    def flaky(method: str, target: str) -> Fault | None:
        with lock:
            return kinds[draws.integers(len(kinds))] if draws.random() < 0.3 else None

    prefix = new_prefix()
    with FaultProxy(server.address) as proxy:
        proxy.plan = flaky
        objects = s3_objects(proxy.url, prefix)
        run = TieredRun(MemoryStorage(), clock=SystemClock(), keep=1)
        tier = run.tier(objects, options=LIVE)
        for _ in range(3):
            newest = run.train_and_save()
        wait_until(tier, lambda s: s.checkpoint == newest and not s.behind_log_bytes)
        tier.close()
        storage = MemoryStorage()
        patient = dataclasses.replace(OPTIONS, retry=RetryPolicy(attempts=20, first_delay_s=0.01))
        pull(storage, objects, context=context(SystemClock(), options=patient))
        assert sum(proxy.struck.values()) > 3
    assert TieredRun(storage).restored_step == run.step
    assert resumed_elsewhere(s3_objects(server.url, prefix)).restored_step == run.step


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.FLIPPED])
def test_answers_that_lie_are_noticed(server: S3Server, fault: Fault) -> None:
    """A body that is short or wrong although the answer looks right, once per object."""
    prefix = new_prefix()
    run = TieredRun(MemoryStorage())
    run.train_and_save()
    run.push(s3_objects(server.url, prefix))
    with FaultProxy(server.address) as proxy:
        lied: set[str] = set()

        def lie_once(method: str, target: str) -> Fault | None:
            first = (
                target not in lied
                and method == "GET"
                and ("/log/" in target or "/model/" in target)
            )
            lied.add(target)
            return fault if first else None

        proxy.plan = lie_once
        storage = MemoryStorage()
        report = pull(storage, s3_objects(proxy.url, prefix), context=context(SystemClock()))
        assert proxy.struck[fault] > 3
    assert report.checkpoint == "step-00000001-1"
    assert report.skipped == ()
    assert TieredRun(storage).restored_step == 1


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.SHORT])
def test_what_reads_back_wrong_is_not_pointed_to(server: S3Server, fault: Fault) -> None:
    with FaultProxy(server.address) as proxy:
        proxy.plan = lambda method, target: (
            fault if method == "GET" and "/model/" in target else None
        )
        objects = s3_objects(proxy.url, new_prefix())
        run = TieredRun(MemoryStorage(), clock=SystemClock())
        tier = run.tier(objects, options=dataclasses.replace(LIVE, close_timeout_s=0.5))
        run.train_and_save()
        wait_until(tier, lambda status: "twice" in status.last_error)
        assert tier.close().checkpoint == ""
        assert proxy.struck[fault] >= 2
        assert read_head(objects).target is None


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.BLACK_HOLE, Fault.FORBIDDEN])
def test_training_does_not_wait_for_a_store_that_is_down(server: S3Server, fault: Fault) -> None:
    prefix = new_prefix()
    with FaultProxy(server.address) as proxy:
        proxy.plan = lambda method, target: fault
        said = Said()
        run = TieredRun(MemoryStorage(), clock=SystemClock())
        tier = run.tier(
            s3_objects(proxy.url, prefix, request_timeout_s=0.5), options=LIVE, events=said
        )
        for _ in range(5):
            run.train_and_save()
        # Less than one request, let alone the repetitions, takes in the black hole.
        assert not run.engine.skipped
        down = wait_until(tier, lambda status: bool(status.last_error))
        assert down.checkpoint == ""
        assert down.behind_checkpoints == len(run.ledger.committed())
        assert down.behind_log_bytes > 0
        assert "remote_failed" in said.names()
        proxy.plan = lambda method, target: None
        up = wait_until(tier, lambda status: not status.behind_checkpoints)
        assert up.checkpoint == "step-00000005-1"
        assert tier.close().last_error == ""
    assert resumed_elsewhere(s3_objects(server.url, prefix)).restored_step == 5


def test_closing_beside_a_black_hole_ends_in_bounded_time(server: S3Server) -> None:
    with FaultProxy(server.address) as proxy:
        proxy.plan = lambda method, target: Fault.BLACK_HOLE
        run = TieredRun(MemoryStorage(), clock=SystemClock())
        objects = s3_objects(proxy.url, new_prefix(), request_timeout_s=1.0)
        tier = run.tier(objects, options=dataclasses.replace(LIVE, close_timeout_s=0.2))
        run.train_and_save()
        started_s = time.monotonic()
        status = tier.close()
        assert time.monotonic() - started_s < 15
        assert status.last_error
        assert status.behind_checkpoints == 1


def test_a_finished_log_segment_is_shipped_at_once(server: S3Server) -> None:
    objects = s3_objects(server.url, new_prefix())
    run = TieredRun(MemoryStorage(), clock=SystemClock())
    tier = run.tier(objects, options=dataclasses.replace(LIVE, log_ship_s=3600.0))
    wait_until(tier, lambda status: status.exposure_s is not None)
    segments = len(run.storage.list("log"))
    run.train()
    for _ in itertools.takewhile(lambda _: len(run.storage.list("log")) == segments, range(100)):
        run.train()
    finished = max(run.storage.list("log"))
    deadline = time.monotonic() + DEADLINE_S
    while finished not in read_head(objects).log:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    tier.close()


def test_a_fenced_tier_says_so_and_lets_training_go_on(server: S3Server) -> None:
    objects = s3_objects(server.url, new_prefix())
    said = Said()
    run = TieredRun(MemoryStorage(), clock=SystemClock())
    tier = run.tier(objects, options=LIVE, events=said)
    newest = run.train_and_save()
    wait_until(tier, lambda status: status.checkpoint == newest)
    other = resumed_elsewhere(objects)
    other.train_and_save()
    other.push(objects)
    run.train_and_save()
    status = wait_until(tier, lambda status: status.fenced)
    assert "holds the remote tier" in status.last_error
    assert "remote_fenced" in said.names()
    run.train_and_save()
    assert tier.close().fenced
    assert resumed_elsewhere(objects).restored_step == other.step
