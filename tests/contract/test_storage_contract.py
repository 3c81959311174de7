"""What every storage promises: one suite, all implementations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import StorageError
from perdure.core.storage_api import Storage
from perdure.storage import FaultyStorage, MemoryStorage, PosixStorage

Maker = Callable[[Path], Storage]

MAKERS: dict[str, Maker] = {
    "posix": lambda root: PosixStorage(root / "deep" / "run"),
    "memory": lambda root: MemoryStorage(),
    "faulty_memory": lambda root: FaultyStorage(MemoryStorage()),
    "faulty_posix": lambda root: FaultyStorage(PosixStorage(root / "run")),
}


@pytest.fixture(params=sorted(MAKERS))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = MAKERS[request.param](tmp_path)
    made.make_dirs("")
    return made


def test_make_dirs_creates_parents_and_is_repeatable(storage: Storage) -> None:
    storage.make_dirs("a/b/c")
    storage.make_dirs("a/b/c")
    assert storage.exists("a/b/c")
    assert storage.list("a") == ["b"]


def test_make_dirs_over_a_file_is_refused(storage: Storage) -> None:
    storage.write_atomic("a", b"")
    with pytest.raises(StorageError, match="directory"):
        storage.make_dirs("a")
    with pytest.raises(StorageError, match="directory"):
        storage.make_dirs("a/b")


def test_append_returns_offsets_and_grows(storage: Storage) -> None:
    file = storage.create_append("log")
    assert (file.path, file.size) == ("log", 0)
    assert file.append([b"abc", memoryview(b"de")]) == 0
    assert file.append([]) == 5
    assert file.append([b"", b"f"]) == 5
    file.sync()
    assert file.size == storage.size("log") == 6
    assert storage.read("log") == b"abcdef"
    file.close()
    file.close()


def test_appended_bytes_are_visible_before_the_sync(storage: Storage) -> None:
    file = storage.create_append("log")
    file.append([b"abc"])
    assert storage.read("log") == b"abc"
    assert storage.size("log") == 3
    file.close()


def test_append_takes_arrays_of_any_item_size(storage: Storage) -> None:
    values = np.arange(12, dtype="<f4").reshape(3, 4)
    file = storage.create_append("log")
    assert file.append([values.data, values[0].data]) == 0
    assert file.size == 64
    assert storage.read("log") == values.tobytes() + values[0].tobytes()
    file.close()


def test_append_of_many_pieces_keeps_their_order(storage: Storage) -> None:
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    file = storage.create_append("log")
    file.append(iter(pieces))
    assert storage.read("log") == b"".join(pieces)
    assert file.size == sum(map(len, pieces))
    file.close()


def test_create_append_refuses_an_existing_path(storage: Storage) -> None:
    storage.create_append("log").close()
    with pytest.raises(FileExistsError):
        storage.create_append("log")


def test_creating_in_an_absent_directory_is_a_storage_error(storage: Storage) -> None:
    with pytest.raises(StorageError, match="No such file"):
        storage.create_append("absent/log")
    with pytest.raises(StorageError, match="No such file"):
        storage.write_atomic("absent/log", b"")
    with pytest.raises(StorageError, match="No such file"):
        storage.create_exclusive("absent/log", b"")


def test_write_atomic_creates_and_replaces(storage: Storage) -> None:
    storage.write_atomic("p.json", b"one")
    storage.write_atomic("p.json", b"second")
    assert storage.read("p.json") == b"second"
    assert storage.list("") == ["p.json"]


def test_write_atomic_never_replaces_a_directory(storage: Storage) -> None:
    storage.make_dirs("d")
    with pytest.raises(StorageError):
        storage.write_atomic("d", b"")
    assert storage.list("") == ["d"]


def test_create_exclusive_has_one_winner(storage: Storage) -> None:
    assert storage.create_exclusive("claim", b"first")
    assert not storage.create_exclusive("claim", b"second")
    assert storage.read("claim") == b"first"
    assert storage.list("") == ["claim"]


def test_of_many_racing_creators_exactly_one_wins(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        for round_number in range(10):
            path = f"claim{round_number}"
            claims = [b"%d" % creator * 100 for creator in range(8)]
            won = list(
                pool.map(lambda data, path=path: storage.create_exclusive(path, data), claims)
            )
            assert won.count(True) == 1
            assert storage.read(path) == claims[won.index(True)]


def test_read_of_a_part(storage: Storage) -> None:
    storage.write_atomic("f", b"0123456789")
    assert storage.read("f", 3) == b"3456789"
    assert storage.read("f", 3, 4) == b"3456"
    assert storage.read("f", 8, 4) == b"89"
    assert storage.read("f", 20, 4) == b""
    assert storage.read("f", 3, 0) == b""


def test_map_is_the_whole_file_and_read_only(storage: Storage) -> None:
    storage.write_atomic("f", bytes(range(200)))
    mapped = storage.map("f")
    assert mapped.dtype == np.uint8
    assert mapped.tobytes() == bytes(range(200))
    assert not mapped.flags.writeable


def test_map_of_an_empty_file_is_empty(storage: Storage) -> None:
    storage.write_atomic("f", b"")
    assert storage.map("f").shape == (0,)


def test_a_map_outlives_the_name(storage: Storage) -> None:
    storage.write_atomic("f", b"kept")
    mapped = storage.map("f")
    storage.remove("f")
    assert mapped.tobytes() == b"kept"


@pytest.mark.parametrize("call", ["read", "map", "size", "sync_file", "sync_dir"])
def test_absent_is_file_not_found(storage: Storage, call: str) -> None:
    with pytest.raises(FileNotFoundError):
        getattr(storage, call)("absent")


@pytest.mark.parametrize("call", ["read", "map"])
def test_reading_a_directory_is_a_storage_error(storage: Storage, call: str) -> None:
    storage.make_dirs("d")
    with pytest.raises(StorageError, match="directory"):
        getattr(storage, call)("d")


def test_exists_and_list(storage: Storage) -> None:
    assert not storage.exists("d")
    assert storage.list("d") == []
    storage.make_dirs("d/z")
    storage.write_atomic("d/b", b"")
    storage.write_atomic("d/a", b"")
    storage.write_atomic("d/.tmp-left-by-a-crash", b"")
    assert storage.exists("d/a")
    assert not storage.exists("d/a/below-a-file")
    assert storage.list("d") == ["a", "b", "z"]


def test_listing_a_file_is_a_storage_error(storage: Storage) -> None:
    storage.write_atomic("f", b"")
    with pytest.raises(StorageError, match="directory"):
        storage.list("f")


def test_rename_moves_files_and_directories(storage: Storage) -> None:
    storage.make_dirs("from/x")
    storage.make_dirs("to")
    storage.write_atomic("from/x/f", b"1")
    storage.write_atomic("to/g", b"old")
    storage.rename("from/x", "to/y")
    storage.rename("to/y/f", "to/g")
    assert storage.read("to/g") == b"1"
    assert storage.list("to") == ["g", "y"]
    assert storage.list("from") == []


def test_rename_of_what_is_absent(storage: Storage) -> None:
    storage.write_atomic("f", b"")
    with pytest.raises(FileNotFoundError):
        storage.rename("absent", "g")
    with pytest.raises(FileNotFoundError):
        storage.rename("f", "absent/g")
    assert storage.list("") == ["f"]


def test_rename_to_itself_changes_nothing(storage: Storage) -> None:
    storage.write_atomic("f", b"1")
    storage.rename("f", "f")
    assert storage.read("f") == b"1"


def test_rename_never_merges_or_replaces_a_full_directory(storage: Storage) -> None:
    storage.make_dirs("a")
    storage.make_dirs("b/c")
    storage.write_atomic("f", b"")
    for source, target in [("a", "b"), ("f", "b"), ("a", "f"), ("b", "b/c/d")]:
        with pytest.raises(StorageError):
            storage.rename(source, target)
    assert storage.list("") == ["a", "b", "f"]


def test_remove_takes_files_and_trees_and_absent_paths(storage: Storage) -> None:
    storage.make_dirs("d/e")
    storage.write_atomic("d/e/f", b"")
    storage.write_atomic("d/.tmp-1", b"")
    storage.write_atomic("g", b"")
    for path in ("d", "g", "absent", "g/below-a-file", "absent/x"):
        storage.remove(path)
    assert storage.list("") == []


def test_what_dead_writers_left_is_collected_and_nothing_else(storage: Storage) -> None:
    storage.make_dirs("d/e")
    left, others = ".tmp-00ff00ff00ff00ff-f", [".tmp-manifest.json", ".tmp-00ff-f", "f"]
    for name in (left, *others):
        storage.write_atomic(f"d/{name}", b"1")
        storage.write_atomic(f"d/e/{name}", b"1")
    assert storage.collect_temporaries("d") == 1
    assert not storage.exists(f"d/{left}")
    assert all(storage.exists(f"d/{name}") for name in others)
    assert storage.exists(f"d/e/{left}")
    assert storage.collect_temporaries("d") == storage.collect_temporaries("absent") == 0
    storage.write_atomic(left, b"1")
    assert storage.collect_temporaries("") == 1


def test_sync_of_files_and_directories(storage: Storage) -> None:
    storage.make_dirs("d")
    storage.write_atomic("d/f", b"1")
    storage.sync_file("d/f")
    storage.sync_dir("d")
    storage.sync_dir("")
    with pytest.raises(StorageError, match="directory"):
        storage.sync_dir("d/f")


def test_an_open_file_outlives_its_name(storage: Storage) -> None:
    file = storage.create_append("log")
    storage.rename("log", "moved")
    file.append([b"abc"])
    file.sync()
    assert storage.read("moved") == b"abc"
    file.close()


def test_lock_is_exclusive_until_released(storage: Storage) -> None:
    held = storage.lock("lock")
    assert held is not None
    assert storage.lock("lock") is None
    other = storage.lock("other")
    assert other is not None
    held.release()
    held.release()
    again = storage.lock("lock")
    assert again is not None
    again.release()
    other.release()


def test_lock_in_an_absent_directory_is_a_storage_error(storage: Storage) -> None:
    with pytest.raises(StorageError):
        storage.lock("absent/lock")


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up"])
def test_paths_stay_below_the_root(storage: Storage, path: str) -> None:
    with pytest.raises(ValueError, match="below the root"):
        storage.read(path)
    with pytest.raises(ValueError, match="below the root"):
        storage.write_atomic(path, b"")


@pytest.mark.parametrize("call", ["create_append", "lock", "remove"])
def test_the_root_itself_is_no_file(storage: Storage, call: str) -> None:
    storage.make_dirs("kept")
    with pytest.raises((StorageError, FileExistsError)):
        getattr(storage, call)("")
    assert storage.list("") == ["kept"]
