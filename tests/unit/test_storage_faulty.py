"""Every fault strikes where planned, leaves what a disk may leave, and is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.core.clock import ManualClock
from perdure.core.errors import StorageError
from perdure.core.storage_api import Storage
from perdure.storage import (
    CrashMode,
    FaultyStorage,
    MemoryStorage,
    RandomFaults,
    StorageFault,
    StorageFaultKind,
)

Kind = StorageFaultKind


def _faulty(kind: Kind, *, hit: int = 1, path_contains: str = "") -> FaultyStorage:
    return FaultyStorage(MemoryStorage(), plan=[StorageFault(kind, hit, path_contains)], seed=7)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Kind.TORN_WRITE, "Input/output error"),
        (Kind.NO_SPACE, "No space left"),
        (Kind.EIO_WRITE, "Input/output error"),
    ],
)
def test_a_failing_append_leaves_a_part_and_abandons_the_file(kind: Kind, says: str) -> None:
    storage = _faulty(kind, hit=2, path_contains="log")
    if kind is not Kind.TORN_WRITE:
        storage = _faulty(kind, hit=3, path_contains="log")  # creating the file counts too
    file = storage.create_append("log")
    file.append([b"kept"])
    with pytest.raises(StorageError, match=says):
        file.append([b"0123456789"])
    assert storage.fired == {kind: 1}
    assert file.size == 4
    assert b"kept0123456789".startswith(storage.read("log"))
    assert storage.read("log").startswith(b"kept")
    for call in (lambda: file.append([b"x"]), file.sync):
        with pytest.raises(StorageError, match="abandoned"):
            call()
    file.close()


def test_torn_lengths_vary_with_the_seed() -> None:
    lengths: set[int] = set()
    for seed in range(40):
        plan = [StorageFault(Kind.TORN_WRITE)]
        storage = FaultyStorage(MemoryStorage(), plan=plan, seed=seed)
        file = storage.create_append("log")
        with pytest.raises(StorageError):
            file.append([b"0123456789"])
        lengths.add(storage.size("log"))
    assert min(lengths) == 0
    assert len(lengths) > 6
    assert max(lengths) < 10


def test_after_a_failed_sync_the_bytes_never_become_durable() -> None:
    inner = MemoryStorage()
    plan = [StorageFault(Kind.EIO_SYNC, hit=2, path_contains="log")]
    storage = FaultyStorage(inner, plan=plan)
    file = storage.create_append("log")
    file.append([b"x"])
    with pytest.raises(StorageError, match="cannot sync"):
        file.sync()
    storage.sync_file("log")
    assert inner.crash(CrashMode.NOTHING_KEPT).read("log") == b""
    storage.rename("log", "moved")
    storage.sync_file("moved")
    storage.sync_dir("")
    assert inner.crash(CrashMode.NOTHING_KEPT).read("moved") == b""


def test_a_new_file_under_the_name_syncs_again() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, plan=[StorageFault(Kind.EIO_SYNC, path_contains="log")])
    inner.create_append("log").append([b"x"])
    with pytest.raises(StorageError):
        storage.sync_file("log")
    storage.remove("log")
    file = storage.create_append("log")
    file.append([b"y"])
    file.sync()
    assert inner.crash(CrashMode.NOTHING_KEPT).read("log") == b"y"


@pytest.mark.parametrize(
    "write",
    [lambda s: s.write_atomic("p", b"new"), lambda s: s.create_exclusive("p", b"new")],
)
def test_a_failed_sync_of_a_whole_write_is_reported_though_the_file_is_there(
    write: Callable[[Storage], object],
) -> None:
    storage = _faulty(Kind.EIO_SYNC)
    with pytest.raises(StorageError, match="sync directory"):
        write(storage)
    assert storage.read("p") == b"new"


@pytest.mark.parametrize("kind", [Kind.TORN_WRITE, Kind.NO_SPACE, Kind.EIO_WRITE])
def test_a_failed_whole_write_changes_nothing(kind: Kind) -> None:
    storage = _faulty(kind, hit=2)
    storage.write_atomic("p", b"old")
    with pytest.raises(StorageError):
        storage.write_atomic("p", b"new")
    assert storage.read("p") == b"old"


def _differing_bits(left: bytes, right: bytes) -> int:
    assert len(left) == len(right)
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))


def test_a_flip_on_write_stays_and_on_read_does_not() -> None:
    data = bytes(range(100))
    written = _faulty(Kind.FLIP_WRITE)
    written.create_append("log").append([data])
    assert [_differing_bits(written.read("log"), data) for _ in range(2)] == [1, 1]
    read = _faulty(Kind.FLIP_READ)
    read.write_atomic("f", data)
    assert [_differing_bits(read.read("f"), data) for _ in range(2)] == [1, 0]
    mapped = _faulty(Kind.FLIP_READ)
    mapped.write_atomic("f", data)
    assert [_differing_bits(mapped.map("f").tobytes(), data) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("call", ["read", "map", "size", "exists", "list"])
def test_a_read_error_is_no_absence(call: str) -> None:
    storage = _faulty(Kind.EIO_READ)
    storage.write_atomic("f", b"")
    with pytest.raises(StorageError, match="Input/output error"):
        getattr(storage, call)("f")
    assert storage.exists("f")


@pytest.mark.parametrize("call", ["read", "map", "size"])
def test_a_vanished_file_is_gone(call: str) -> None:
    storage = _faulty(Kind.VANISH)
    storage.write_atomic("f", b"")
    with pytest.raises(FileNotFoundError):
        getattr(storage, call)("f")
    assert not storage.exists("f")
    assert storage.fired == {Kind.VANISH: 1}


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.make_dirs("d"),
        lambda s: s.create_append("g"),
        lambda s: s.rename("f", "g"),
        lambda s: s.remove("f"),
    ],
)
@pytest.mark.parametrize("kind", [Kind.NO_SPACE, Kind.EIO_WRITE])
def test_changes_of_names_fail_before_they_take_effect(
    call: Callable[[Storage], object], kind: Kind
) -> None:
    storage = _faulty(kind, hit=2)
    storage.write_atomic("f", b"")
    with pytest.raises(StorageError):
        call(storage)
    assert storage.list("") == ["f"]


@pytest.mark.parametrize("call", [lambda s: s.sync_dir(""), lambda s: s.create_append("g")])
def test_a_directory_sync_can_fail(call: Callable[[Storage], object]) -> None:
    with pytest.raises(StorageError, match="sync directory"):
        call(_faulty(Kind.EIO_SYNC))


def test_slow_sleeps_on_the_clock_and_then_works() -> None:
    clock = ManualClock(0.0)
    storage = FaultyStorage(
        MemoryStorage(), plan=[StorageFault(Kind.SLOW, hit=2)], clock=clock, slow_s=3.0
    )
    storage.write_atomic("f", b"1")
    assert clock.monotonic_s() == 0.0
    assert storage.read("f") == b"1"
    assert clock.monotonic_s() == 3.0


def test_a_fault_waits_for_its_path() -> None:
    storage = _faulty(Kind.NO_SPACE, path_contains="checkpoints/")
    storage.make_dirs("log")
    storage.write_atomic("p", b"1")
    with pytest.raises(StorageError):
        storage.make_dirs("checkpoints/step-1")


def _seeded_history(seed: int) -> tuple[list[str], dict[Kind, int]]:
    storage = FaultyStorage(
        MemoryStorage(), seed=seed, random=RandomFaults(0.2), clock=ManualClock()
    )
    history: list[str] = []
    for number in range(60):
        try:
            storage.write_atomic("f", b"%d" % number)
            history.append(storage.read("f").hex())
        except (StorageError, FileNotFoundError) as error:
            history.append(type(error).__name__)
    return history, dict(storage.fired)


def test_a_seed_repeats_the_faults_and_another_does_not() -> None:
    first, fired = _seeded_history(1)
    assert (first, fired) == _seeded_history(1)
    assert first != _seeded_history(2)[0]
    assert sum(fired.values()) > 5
    assert len(fired) > 3


def test_random_faults_are_of_the_kinds_asked_for() -> None:
    storage = FaultyStorage(MemoryStorage(), random=RandomFaults(1.0, (Kind.EIO_READ,)))
    storage.write_atomic("f", b"1")
    with pytest.raises(StorageError):
        storage.read("f")
    assert storage.fired == {Kind.EIO_READ: 1}


def test_locks_pass_through() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, random=RandomFaults(1.0, (Kind.EIO_READ,)))
    lock = storage.lock("lock")
    assert lock is not None
    assert inner.lock("lock") is None
    lock.release()
