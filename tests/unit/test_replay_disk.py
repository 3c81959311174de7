"""Replay on a real disk: what is written without being copied, and what is read ahead."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from replay_cases import COLUMNS, ReplayRun, rows, small_ring, values_of

from perdure.checkpoint import ReplayArrays, ReplayRing, RingOptions
from perdure.checkpoint.segments.format import BLOCK_BYTES, encode_index, pieces
from perdure.checkpoint.segments.memory import SegmentMemory
from perdure.checkpoint.segments.writing import SegmentFiles
from perdure.core.errors import DamagedError, StorageError
from perdure.core.storage_api import Storage
from perdure.storage import (
    FaultyStorage,
    MemoryStorage,
    PosixStorage,
    StorageFault,
    StorageFaultKind,
    bulk,
)

WIDE: dict[str, Any] = {"obs": ("u1", (7,)), "none": ("f4", (0,)), "at": ("i8", ())}
ROW_BYTES = 15


def wide(first: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
    numbers = np.arange(first, first + count)
    obs = np.random.default_rng(first).integers(0, 256, (count, 7), np.uint8)
    return {"obs": obs, "none": np.zeros((count, 0), np.float32), "at": numbers}


def wide_ring(rows_per_segment: int) -> ReplayRing:
    return ReplayRing(10**6, WIDE, options=RingOptions(segment_bytes=ROW_BYTES * rows_per_segment))


class Watched(PosixStorage):
    """Notes what it is told beforehand."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.told: dict[str, list[tuple[int, int]]] = {}

    def prefetch(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        self.told.setdefault(path, []).extend(ranges)
        super().prefetch(path, ranges)


def contents(run: ReplayRun) -> dict[str, bytes]:
    return {name: run.storage.read(f"segments/replay/{name}") for name in run.files()}


@pytest.mark.parametrize("appended", [1, 1000, 2000, 2500, 2999])
def test_the_disk_gets_the_bytes_that_any_storage_gets(tmp_path: Path, appended: int) -> None:
    """Full segments are written where they lie, the rest is gathered."""
    runs = [ReplayRun(PosixStorage(tmp_path)), ReplayRun(MemoryStorage())]
    for run in runs:
        run.replay = wide_ring(1000)
        run.registry.register("wide", run.replay, kind="experience")
        run.replay.append(wide(0, appended))
        run.save_well(1)
    disk, memory = (
        {
            name: run.storage.read(f"segments/wide/{name}")
            for name in run.storage.list("segments/wide")
        }
        for run in runs
    )
    assert disk == memory
    assert len(disk) == -(-appended // 1000)


def test_a_full_segment_is_a_file_without_copying() -> None:
    memory = SegmentMemory(1000, {name: (np.dtype(t), shape) for name, (t, shape) in WIDE.items()})
    for name, column in wide(0, 1000).items():
        memory.arrays[name][:] = column
    index = encode_index("replay", 0, 1000, memory.arrays)
    image = memory.image(index, memory.arrays)
    assert image is not None
    assert np.shares_memory(image, memory.arrays["obs"])
    assert image.ctypes.data % bulk.ALIGNMENT == image.nbytes % bulk.ALIGNMENT == 0
    expected = b"".join(bytes(piece) for piece in pieces(index, memory.arrays))
    assert image.tobytes()[: len(expected)] == expected


@pytest.mark.parametrize("reason", ["fewer rows", "other memory", "a long index", "another order"])
def test_what_does_not_lie_as_the_file_is_no_image(reason: str) -> None:
    types = {name: (np.dtype(t), shape) for name, (t, shape) in COLUMNS.items()}
    memory = SegmentMemory(4, types)
    arrays = dict(memory.arrays)
    index = encode_index("replay", 0, 4, arrays)
    assert memory.image(index, arrays) is not None
    if reason == "fewer rows":
        arrays = {name: array[:3] for name, array in arrays.items()}
    elif reason == "other memory":
        arrays |= {"done": arrays["done"].copy()}
    elif reason == "a long index":
        index = encode_index("r" * 5000, 0, 4, arrays)
    else:
        arrays = dict(reversed(arrays.items()))
    assert memory.image(index, arrays) is None


def test_a_copied_ring_saves_its_own_rows(tmp_path: Path) -> None:
    run = ReplayRun(PosixStorage(tmp_path), small_ring(100))
    run.replay.append(rows(0, 10))
    run.replay = copy.deepcopy(run.replay)
    again = ReplayRun(run.storage, run.replay, incarnation=2)
    again.replay.append(rows(10, 3))
    again.save_well(1)
    loaded = ReplayRun(run.storage, small_ring(100), incarnation=3)
    loaded.restore()
    assert values_of(loaded.replay) == list(range(13))


def test_arrays_of_another_library_are_written_from_their_copy(tmp_path: Path) -> None:
    class Owner:
        pos, full = 0, False

    live = {name: np.zeros((50, *shape), t) for name, (t, shape) in COLUMNS.items()}
    for name, column in rows(0, 30).items():
        live[name][:30] = column
    owner = Owner()
    owner.pos = 30
    run = ReplayRun(PosixStorage(tmp_path), ReplayArrays(live, owner, segment_bytes=120))
    run.save_well(1)
    assert len(run.files()) == 3
    fresh = {name: np.zeros_like(column) for name, column in live.items()}
    again = ReplayRun(run.storage, ReplayArrays(fresh, Owner(), segment_bytes=120), incarnation=2)
    again.restore()
    for name, column in live.items():
        np.testing.assert_array_equal(fresh[name], column)


def test_a_draw_is_read_ahead_block_by_block_and_once(tmp_path: Path) -> None:
    storage = Watched(tmp_path)
    run = ReplayRun(storage, wide_ring(30_000))
    run.replay.append(wide(0, 60_000))
    run.save_well(1)
    again = ReplayRun(storage, wide_ring(30_000), incarnation=2)
    again.restore()
    numbers = np.array([3, 29_999, 30_000, 45_000])
    np.testing.assert_array_equal(again.replay.rows(numbers)["at"], numbers)
    assert sorted(path.rpartition("/")[2] for path in storage.told) == run.files()
    for ranges in storage.told.values():
        assert all(0 < end - start <= 2 * BLOCK_BYTES for start, end in ranges)
        assert len(set(ranges)) == len(ranges)
    # Of either column: the first and the last block of one file, the first two of the other.
    assert [len(storage.told[path]) for path in sorted(storage.told)] == [4, 2]
    storage.told.clear()
    again.replay.rows(numbers)
    assert not any(storage.told.values())


def test_reading_ahead_of_what_is_absent_is_nobodys_error(tmp_path: Path) -> None:
    PosixStorage(tmp_path).prefetch("absent", [(0, 10)])


def test_segments_that_cannot_be_deleted_fail_no_save_and_go_after_a_later_one() -> None:
    class Stubborn(MemoryStorage):
        refused = "nothing"

        def rename(self, source: str, target: str) -> None:
            self._refuse("rename", target)
            super().rename(source, target)

        def remove(self, path: str) -> None:
            self._refuse("remove", path)
            super().remove(path)

        def _refuse(self, verb: str, path: str) -> None:
            if f"{verb} {path}".startswith(self.refused) and not path.endswith(".part"):
                raise StorageError(f"cannot {verb}", where=path)

    storage = Stubborn()
    run = ReplayRun(storage, small_ring())
    run.replay.append(rows(0, 12))
    storage.refused = "rename checkpoints/step-00000001-1/manifest.json"
    run.save(1)
    assert isinstance(run.engine.last_error, StorageError)
    run.replay.append(rows(12, 12))
    # What the first save stored for nothing is held by nobody any more, not even by its error.
    storage.refused = "remove segments/replay/"
    run.save_well(2)
    warnings = [fields["message"] for name, fields in run.events if name == "warning"]
    assert "could not be collected" in warnings[-1]
    left = len(run.files())
    storage.refused = "nothing"
    run.save_well(3)
    assert len(run.files()) < left
    assert [record.step for record in run.ledger.committed()] == [2, 3]
    run.engine.close()


@pytest.mark.parametrize("name", ["disk", "memory"])
def test_what_reads_back_wrong_is_noticed_wherever_it_is(tmp_path: Path, name: str) -> None:
    """Index, blocks, the zeros between columns, the size: on a disk and anywhere else."""
    storage: Storage = PosixStorage(tmp_path) if name == "disk" else MemoryStorage()
    storage.make_dirs("segments")
    count = bulk.CHUNK_BYTES // 7 + 100
    obs = np.random.default_rng(0).integers(0, 256, (count, 7), np.uint8)
    files, arrays = SegmentFiles(storage), {"obs": obs, "done": np.ones(count, np.bool_)}
    index = encode_index("replay", 0, count, arrays)
    files.write("segments/one", index, arrays, None)
    whole = storage.read("segments/one")
    assert files.read_back("segments/one", index) == xxhash.xxh3_128_hexdigest(whole)
    behind = len(index) + arrays["obs"].nbytes
    assert behind % bulk.ALIGNMENT
    flipped = [0, len(index) - 1, len(index), bulk.CHUNK_BYTES, behind - 1, behind, len(whole) - 1]
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in flipped]
    for number, content in enumerate([*damaged, whole[:-1], whole + b"\0"]):
        path = f"segments/damaged-{number}"
        file = storage.create_append(path)
        file.append([content])
        file.sync()
        file.close()
        with pytest.raises(DamagedError, match="reads back wrong"):
            files.read_back(path, index)


def test_a_segment_that_reads_back_wrong_gets_no_name() -> None:
    plan = [StorageFault(StorageFaultKind.FLIP_WRITE, 2, ".part")]
    storage = FaultyStorage(MemoryStorage(), plan=plan)
    run = ReplayRun(storage, small_ring(8))
    run.replay.append(rows(0, 8))
    run.save(1)
    assert isinstance(run.engine.last_error, DamagedError)
    assert "reads back wrong" in str(run.engine.last_error)
    assert storage.fired[StorageFaultKind.FLIP_WRITE] == 1
    assert not [name for name in run.files() if name.endswith(".seg")]
    assert not run.ledger.committed()
    run.save_well(2)
    assert all(name.endswith(".seg") for name in run.files())
