"""The memory storage loses what a disk may lose; each kind of loss is really shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from perdure.core.errors import StorageError
from perdure.storage import CrashMode, MemoryStorage, PowerLost


def _found(storage: MemoryStorage, path: str) -> set[bytes | None]:
    return {found.files().get(path) for found in storage.crash_states()}


def test_unsynced_bytes_may_be_lost_torn_zeroed_or_arbitrary() -> None:
    storage = MemoryStorage()
    file = storage.create_append("log")
    file.append([b"s" * 600])
    file.sync()
    file.append([b"a" * 300])
    file.append([b"b" * 900])
    whole = b"s" * 600 + b"a" * 300 + b"b" * 900
    found = _found(storage, "log")
    assert None not in found
    assert {whole[:600], whole[:601], whole[:900], whole[:1024], whole} <= found
    assert whole[:600] + bytes(1200) in found, "size on disk before the bytes"
    assert whole[:600] + bytes(424) + whole[1024:] in found, "a later sector before an earlier one"
    assert any(len(data or b"") == 1800 and b"s" not in (data or b"")[600:] for data in found)
    assert all((data or b"").startswith(b"s" * 600) for data in found)


def test_random_crashes_differ_and_keep_the_synced_part() -> None:
    storage = MemoryStorage(seed=5)
    file = storage.create_append("log")
    file.append([b"s" * 100])
    file.sync()
    file.append([b"u" * 3000])
    found = [storage.crash().read("log") for _ in range(40)]
    assert len(set(found)) > 10
    assert all(data.startswith(b"s" * 100) and len(data) <= 3100 for data in found)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (CrashMode.NOTHING_KEPT, {"log": b"s"}),
        (CrashMode.EVERYTHING_KEPT, {"new": b"suu"}),
        (CrashMode.NAMES_KEPT, {"new": b"s"}),
        (CrashMode.BYTES_KEPT, {"log": b"suu"}),
        (CrashMode.ZEROS, {"new": b"s\0\0"}),
    ],
)
def test_modes(mode: CrashMode, expected: dict[str, bytes]) -> None:
    storage = MemoryStorage()
    file = storage.create_append("log")
    file.append([b"s"])
    file.sync()
    file.append([b"uu"])
    storage.rename("log", "new")
    assert storage.crash(mode).files() == expected


def test_garbage_has_the_size_and_not_the_bytes() -> None:
    storage = MemoryStorage()
    storage.create_append("log").append([b"u" * 64])
    data = storage.crash(CrashMode.GARBAGE).read("log")
    assert len(data) == 64
    assert data != b"u" * 64


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (lambda s: s.rename("a", "b"), {"a": b"1"}, {"b": b"1"}),
        (lambda s: s.remove("a"), {"a": b"1"}, {}),
    ],
)
def test_a_change_of_names_may_be_dropped_until_the_directory_is_synced(
    change: Callable[[MemoryStorage], None], before: dict[str, bytes], after: dict[str, bytes]
) -> None:
    storage = MemoryStorage()
    storage.write_atomic("a", b"1")
    change(storage)
    found = [state.files() for state in storage.crash_states()]
    assert before in found
    assert after in found
    storage.sync_dir("")
    assert {tuple(state.files().items()) for state in storage.crash_states()} == {
        tuple(after.items())
    }


def test_unsynced_changes_are_lost_one_by_one() -> None:
    storage = MemoryStorage()
    for name in "abc":
        storage.write_atomic(name, name.encode())
    for name in "abc":
        storage.remove(name)
    found = {"".join(sorted(state.files())) for state in storage.crash_states()}
    assert {"", "a", "b", "c", "ab", "bc", "ac", "abc"} == found


def test_a_name_may_be_durable_before_the_bytes() -> None:
    """Why an atomic write syncs the file before it renames it."""
    storage = MemoryStorage()
    file = storage.create_append("t")
    file.append([b"content"])
    storage.rename("t", "p")
    storage.sync_dir("")
    assert {b"", b"c", b"content", bytes(7)} <= _found(storage, "p")


def test_a_rename_between_directories_waits_for_both_and_never_loses_the_file() -> None:
    storage = MemoryStorage()
    storage.make_dirs("d")
    storage.write_atomic("p", b"1")
    storage.rename("p", "d/p")
    storage.sync_dir("d")
    found = [state.files() for state in storage.crash_states()]
    assert {"p": b"1"} in found
    assert {"d/p": b"1"} in found
    assert all(len(files) == 1 for files in found)
    storage.sync_dir("")
    assert all(state.files() == {"d/p": b"1"} for state in storage.crash_states())


def test_a_durable_rename_carries_the_earlier_ones_it_rests_on() -> None:
    storage = MemoryStorage()
    for name in ("a", "b", "c"):
        storage.make_dirs(name)
    storage.write_atomic("a/f", b"1")
    storage.rename("a/f", "b/f")
    storage.rename("b/f", "c/f")
    storage.sync_dir("b")
    storage.sync_dir("c")
    assert all(state.files() == {"c/f": b"1"} for state in storage.crash_states())


def test_renaming_over_a_durable_file_shows_old_or_new() -> None:
    storage = MemoryStorage()
    storage.write_atomic("p", b"old")
    storage.write_atomic("q", b"new")
    storage.rename("q", "p")
    assert _found(storage, "p") == {b"old", b"new"}


def test_a_removal_does_not_strike_the_file_that_a_dropped_rename_would_have_replaced() -> None:
    storage = MemoryStorage()
    storage.write_atomic("p", b"old")
    storage.write_atomic("q", b"new")
    storage.rename("q", "p")
    storage.remove("p")
    found = {tuple(sorted(state.files().items())) for state in storage.crash_states()}
    assert found == {(("p", b"old"), ("q", b"new")), (("p", b"new"),), ()}


def test_an_atomic_write_is_five_steps_in_order() -> None:
    storage = MemoryStorage()
    storage.write_atomic("p", b"x")
    kinds = [operation.kind for operation in storage.journal]
    assert kinds == ["create", "write", "sync", "rename", "sync_dir"]
    assert storage.operations == 5


@pytest.mark.parametrize("steps", range(5))
def test_power_lost_inside_an_atomic_write_leaves_the_old_file(steps: int) -> None:
    storage = MemoryStorage(seed=steps)
    storage.write_atomic("p", b"old")
    storage.fail_after = 5 + steps
    with pytest.raises(PowerLost):
        storage.write_atomic("p", b"new")
    found = _found(storage, "p")
    assert found == ({b"old"} if steps < 4 else {b"old", b"new"})


def test_without_power_nothing_works_any_more() -> None:
    storage = MemoryStorage()
    file = storage.create_append("log")
    other = storage.open_as_new_process()
    storage.fail_after = storage.operations
    with pytest.raises(PowerLost):
        file.append([b"x"])
    for call in (
        file.sync,
        lambda: storage.read("log"),
        lambda: other.exists("log"),
        lambda: other.write_atomic("p", b""),
        lambda: other.lock("lock"),
    ):
        with pytest.raises(PowerLost):
            call()
    assert storage.crash().exists("log")


def test_power_lost_is_no_exception() -> None:
    assert not issubclass(PowerLost, Exception)


def test_a_write_at_which_the_power_goes_is_torn() -> None:
    lengths: set[int] = set()
    for seed in range(80):
        storage = MemoryStorage(seed)
        file = storage.create_append("log")
        storage.fail_after = storage.operations
        with contextlib.suppress(PowerLost):
            file.append([b"x" * 10])
        lengths.add(len(storage.process_kill().read("log")))
    assert lengths == set(range(11))


def test_the_page_cache_survives_a_kill_and_not_a_later_loss_of_power() -> None:
    storage = MemoryStorage()
    storage.create_append("log").append([b"x"])
    left = storage.process_kill()
    assert left.read("log") == b"x"
    assert _found(left, "log") >= {b"", b"x"}
    left.sync_file("log")
    assert _found(left, "log") == {b"x"}
    assert b"" in _found(storage, "log"), "the copy's sync does not reach the original"


def test_processes_contend_for_locks_and_lose_them_when_they_die() -> None:
    first = MemoryStorage()
    second = first.open_as_new_process()
    lock = first.lock("lock")
    assert lock is not None
    assert second.lock("lock") is None
    first.die()
    with pytest.raises(PowerLost):
        first.exists("lock")
    second_lock = second.lock("lock")
    assert second_lock is not None
    lock.release()
    assert second.open_as_new_process().lock("lock") is None, "the dead cannot free it"


@pytest.mark.parametrize("after", [MemoryStorage.crash, MemoryStorage.process_kill])
def test_crash_and_kill_drop_locks(after: Callable[[MemoryStorage], MemoryStorage]) -> None:
    storage = MemoryStorage()
    assert storage.lock("lock") is not None
    assert after(storage).lock("lock") is not None


def test_an_open_file_of_a_dead_process_writes_no_more() -> None:
    storage = MemoryStorage()
    file = storage.create_append("log")
    other = storage.open_as_new_process()
    storage.die()
    with pytest.raises(PowerLost):
        file.append([b"x"])
    assert other.read("log") == b""


def test_damage_is_durable_and_silent() -> None:
    storage = MemoryStorage()
    storage.create_append("log").append([b"abc"])
    before = storage.operations
    storage.damage("log", b"xy")
    assert storage.operations == before
    assert _found(storage, "log") == {b"xy"}
    with pytest.raises(FileNotFoundError):
        storage.damage("absent", b"")


def test_the_unsynced_directory_takes_its_files_with_it() -> None:
    """A durable file in a directory whose rename is not durable is found under one of both."""
    storage = MemoryStorage()
    storage.make_dirs("checkpoints/tmp")
    storage.write_atomic("checkpoints/tmp/f", b"1")
    storage.rename("checkpoints/tmp", "checkpoints/step-1")
    found = [tuple(state.files()) for state in storage.crash_states()]
    assert set(found) == {("checkpoints/tmp/f",), ("checkpoints/step-1/f",)}


def test_a_removed_tree_may_come_back_in_part() -> None:
    storage = MemoryStorage()
    storage.make_dirs("d")
    storage.write_atomic("d/a", b"1")
    storage.write_atomic("d/b", b"2")
    storage.remove("d")
    found = {tuple(state.files()) for state in storage.crash_states()}
    assert {(), ("d/a",), ("d/b",), ("d/a", "d/b")} <= found
    storage.sync_dir("")
    assert not storage.crash(CrashMode.NOTHING_KEPT).exists("d")


def test_locking_a_directory_is_refused() -> None:
    storage = MemoryStorage()
    storage.make_dirs("d")
    with pytest.raises(StorageError):
        storage.lock("d")
