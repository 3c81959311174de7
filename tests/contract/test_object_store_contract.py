"""What the remote tier asks of an object store, on every store it is tested with."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from fault_proxy import Fault, FaultProxy
from object_servers import S3Server, new_prefix, s3_objects, s3_server
from obstore.store import MemoryStore
from tier_cases import BreakingObjects, memory_objects

from perdure.checkpoint.tier import (
    ObjectStore,
    ObstoreObjects,
    RemoteUnavailableError,
    RetryingObjects,
    RetryPolicy,
    open_objects,
    probe_objects,
)
from perdure.core.clock import ManualClock, SystemClock
from perdure.core.errors import ConfigError, StorageError

Call = Callable[[ObjectStore], object]
PROBED = ["remote write", "remote read", "remote list", "remote swap", "remote delete"]
KINDS = ["memory", "s3", "s3 behind a proxy", "memory with retries", "directory"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(params=KINDS)
def objects(
    request: pytest.FixtureRequest, server: S3Server, tmp_path: Path
) -> Iterator[ObjectStore]:
    if request.param == "s3":
        yield s3_objects(server.url, new_prefix())
    elif request.param == "s3 behind a proxy":
        with FaultProxy(server.address) as proxy:
            yield s3_objects(proxy.url, new_prefix())
    elif request.param == "memory":
        yield ObstoreObjects(MemoryStore())
    elif request.param == "directory":
        yield open_objects(f"file://{tmp_path}/runs%20of%20mine")
    else:
        yield RetryingObjects(
            ObstoreObjects(MemoryStore()), policy=RetryPolicy(), clock=ManualClock()
        )


def test_an_object_is_created_once(objects: ObjectStore) -> None:
    assert objects.create("a/b", b"one")
    assert not objects.create("a/b", b"two")
    assert objects.read("a/b") == b"one"
    objects.overwrite("a/b", b"three")
    assert objects.read("a/b") == b"three"


def test_bytes_come_back_whole(objects: ObjectStore) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    data.flags.writeable = False
    assert objects.create("big", data.data)
    assert objects.read("big") == data.tobytes()
    for chunk_bytes in (1000, 30_000, 99_999, 100_000, 200_000):
        chunks = [data[start : start + chunk_bytes] for start in range(0, 100_000, chunk_bytes)]
        sums = tuple(xxhash.xxh3_128_hexdigest(chunk.data) for chunk in chunks)
        assert objects.fingerprint("big", chunk_bytes=chunk_bytes) == (100_000, sums)
    out = bytearray(100_000)
    assert objects.read_into("big", memoryview(out))
    assert out == data.tobytes()
    assert not objects.read_into("big", memoryview(bytearray(99_999)))
    assert not objects.read_into("big", memoryview(bytearray(100_001)))
    assert objects.create("empty", b"")
    assert objects.read("empty") == b""
    assert objects.read_into("empty", memoryview(bytearray()))
    assert objects.fingerprint("empty", chunk_bytes=1) == (0, (xxhash.xxh3_128_hexdigest(b""),))


def test_a_swap_needs_the_state_it_was_made_from(objects: ObjectStore) -> None:
    first = objects.swap("head", b"1", expected=None)
    assert first is not None
    assert objects.swap("head", b"other", expected=None) is None
    second = objects.swap("head", b"2", expected=first)
    assert second is not None
    assert objects.swap("head", b"3", expected=first) is None
    assert objects.read_tagged("head") == (b"2", second)
    assert objects.swap("absent", b"3", expected=second) is None


def test_of_many_swaps_at_once_one_wins(objects: ObjectStore) -> None:
    tag = objects.swap("head", b"0", expected=None)
    won: list[int] = []
    barrier = threading.Barrier(8)

    def swap(number: int) -> None:
        barrier.wait(20)
        if objects.swap("head", str(number).encode() * 3, expected=tag) is not None:
            won.append(number)

    threads = [threading.Thread(target=swap, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(won) == 1
    assert objects.read("head") == str(won[0]).encode() * 3


def test_what_is_absent_is_not_found(objects: ObjectStore) -> None:
    into = memoryview(bytearray(10))
    reads: list[Call] = [
        lambda objects: objects.read("nothing/here"),
        lambda objects: objects.read_tagged("nothing/here"),
        lambda objects: objects.read_into("nothing/here", into),
        lambda objects: objects.fingerprint("nothing/here", chunk_bytes=1),
    ]
    for read in reads:
        with pytest.raises(FileNotFoundError):
            read(objects)
    objects.delete(["nothing/here"])
    assert objects.list("nothing") == {}


def test_listing_goes_by_folders(objects: ObjectStore) -> None:
    keys = [f"dir/{number:04d}" for number in range(1100)] if _is_fast(objects) else ["dir/0001"]
    for key in keys:
        objects.create(key, b"x")
    objects.create("dir/sub/deep", b"xyz")
    objects.create("dir-other", b"x")
    found = objects.list("dir")
    assert sorted(found) == sorted([*keys, "dir/sub/deep"])
    assert found["dir/sub/deep"] == 3
    objects.delete(list(found))
    assert objects.list("dir") == {}
    assert objects.read("dir-other") == b"x"


def _is_fast(objects: ObjectStore) -> bool:
    inner = objects.objects if isinstance(objects, RetryingObjects) else objects
    return isinstance(inner, ObstoreObjects) and isinstance(inner.store, MemoryStore)


def test_a_listing_of_several_pages_is_whole(server: S3Server) -> None:
    objects = s3_objects(server.url, new_prefix())
    threads = [
        threading.Thread(
            target=lambda start: [
                objects.create(f"many/{n:05d}", b"") for n in range(start, start + 275)
            ],
            args=(start,),
        )
        for start in range(0, 1100, 275)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert len(objects.list("many")) == 1100


def test_a_store_that_keeps_the_contract_passes_the_probe(objects: ObjectStore) -> None:
    findings = probe_objects(objects, clock=SystemClock())
    assert [finding.name for finding in findings] == PROBED
    assert {finding.grade for finding in findings} == {"ok"}, findings
    assert objects.list("") == {}


CALLS: dict[str, Call] = {
    "create": lambda objects: objects.create("new", b"data" * 5000),
    "overwrite": lambda objects: objects.overwrite("old", b"data" * 5000),
    "swap": lambda objects: objects.swap("swapped", b"data" * 5000, expected=None),
    "read": lambda objects: objects.read("old"),
    "read_into": lambda objects: objects.read_into("old", memoryview(bytearray(20_000))),
    "fingerprint": lambda objects: objects.fingerprint("old", chunk_bytes=1 << 20),
    "tagged": lambda objects: objects.read_tagged("old"),
    "list": lambda objects: objects.list(""),
    "delete": lambda objects: objects.delete(["other"]),
}
HONEST = [
    Fault.UNAVAILABLE,
    Fault.RESET_IN_REQUEST,
    Fault.ANSWER_LOST,
    Fault.RESET_IN_ANSWER,
    Fault.TRUNCATED,
]
WITH_BODY = {"read", "read_into", "fingerprint", "tagged", "list"}
CASES = [(name, fault) for name in sorted(CALLS) for fault in HONEST]
SILENT = [("create", Fault.BLACK_HOLE), ("read", Fault.BLACK_HOLE)]


@pytest.mark.parametrize(("name", "fault"), [*CASES, *SILENT])
def test_a_request_that_fails_may_be_repeated(server: S3Server, name: str, fault: Fault) -> None:
    if fault in (Fault.RESET_IN_ANSWER, Fault.TRUNCATED) and name not in WITH_BODY:
        fault = Fault.ANSWER_LOST
    with FaultProxy(server.address) as proxy:
        timeout_s = 1.0 if fault is Fault.BLACK_HOLE else 20.0
        objects = s3_objects(proxy.url, new_prefix(), request_timeout_s=timeout_s)
        for key in ("old", "other"):
            objects.create(key, b"0" * 20_000)
        proxy.plan = lambda method, target: fault
        with pytest.raises(RemoteUnavailableError):
            CALLS[name](objects)
        assert proxy.struck[fault] == 1, "obstore itself repeats nothing"
        failures = [1, 1]
        proxy.plan = lambda method, target: fault if failures and failures.pop() else None
        retrying = RetryingObjects(objects, policy=RetryPolicy(), clock=ManualClock())
        CALLS[name](retrying)
        assert retrying.retries >= 2


def test_refused_access_is_not_asked_for_again(server: S3Server) -> None:
    with FaultProxy(server.address) as proxy:
        objects = s3_objects(proxy.url, new_prefix())
        proxy.plan = lambda method, target: Fault.FORBIDDEN
        retrying = RetryingObjects(objects, policy=RetryPolicy(), clock=ManualClock())
        with pytest.raises(StorageError, match="check the credentials") as raised:
            retrying.read("anything")
        assert not isinstance(raised.value, RemoteUnavailableError)
        assert proxy.struck[Fault.FORBIDDEN] == 1


@pytest.mark.parametrize("url", ["gs://b/x", "bucket/x", "/shared/x"])
def test_addresses_without_conditional_replacement_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a remote tier"):
        open_objects(url)


@pytest.mark.parametrize("url", ["file://shared/x", "file:x", "file:///", "file:///a?b"])
def test_directories_are_named_with_the_whole_path(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        open_objects(url)


def test_two_processes_swap_in_turn_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    """Each raises a number by one, again and again; one of them is killed meanwhile."""
    code = (
        "import sys\n"
        "from perdure.checkpoint.tier import open_objects, RemoteUnavailableError\n"
        "objects = open_objects(sys.argv[1])\n"
        "done = 0\n"
        "while done < 100:\n"
        "    data, tag = objects.read_tagged('n')\n"
        "    try:\n"
        "        won = objects.swap('n', str(int(data) + 1).encode(), expected=tag)\n"
        "    except RemoteUnavailableError:\n"
        "        continue\n"
        "    done += won is not None\n"
        "    if won and done == 50: print('half', flush=True)\n"
    )
    url = f"file://{tmp_path}/tier"
    objects = open_objects(url)
    assert objects.swap("n", b"0", expected=None)
    command = [sys.executable, "-c", code, url]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as killed,
        subprocess.Popen(command, stdout=subprocess.PIPE) as other,
    ):
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"half\n"
        killed.kill()
        assert other.wait(60) == 0
    counted = int(objects.read("n"))
    assert 150 <= counted <= 200
    assert objects.swap("n", b"free", expected=objects.read_tagged("n")[1])


def test_where_nothing_is_mounted_nothing_is_made(tmp_path: Path) -> None:
    objects = open_objects(f"file://{tmp_path}/share/runs/x")
    for call in CALLS.values():
        with pytest.raises(RemoteUnavailableError, match="mount it"):
            call(objects)
    assert not [*tmp_path.iterdir()]


def test_a_file_in_the_way_is_a_failure_of_the_store(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"a file is in the way")
    objects = open_objects(f"file://{target}")
    with pytest.raises(RemoteUnavailableError, match="failed"):
        objects.create("a", b"")


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_objects("s3://bucket/x", config={"no_such_setting": "1"})


def test_the_last_failure_is_raised_and_waits_grow_within_bounds() -> None:
    policy = RetryPolicy(attempts=6, first_delay_s=1.0, longest_delay_s=4.0)
    delays = [policy.delay_s(attempt, key="k") for attempt in range(1, 6)]
    for delay_s, bound_s in zip(delays, [1, 2, 4, 4, 4], strict=True):
        assert bound_s / 2 <= delay_s <= bound_s
    assert 2 <= policy.delay_s(100_000, key="k") <= 4, "a store may be down for days"
    assert policy.delay_s(1, key="a") != policy.delay_s(1, key="b"), "clients do not march in step"
    clock = ManualClock(0.0)
    failures = {n: (RemoteUnavailableError(f"failure {n}"), False) for n in range(9)}
    down = RetryingObjects(BreakingObjects(memory_objects(), failures), policy=policy, clock=clock)
    with pytest.raises(RemoteUnavailableError, match="failure 5"):
        down.read("k")
    assert clock.monotonic_s() == pytest.approx(sum(delays))
    down.stop.set()
    with pytest.raises(RemoteUnavailableError, match="failure 6"):
        down.read("k")
    assert clock.monotonic_s() == pytest.approx(sum(delays))
    with pytest.raises(ConfigError):
        RetryPolicy(attempts=0)
