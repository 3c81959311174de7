"""The memory of payload records: the same bytes, lent again only when nobody looks at them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from perdure.core.record_types import RecordType
from perdure.core.trajectories import Array
from perdure.experience.entries import MAX_BYTES
from perdure.experience.format import laid_out, prepare_record, record_pieces
from perdure.experience.record_memory import MemoryBlocks, RecordMemory

FIELDS = {"actor": "a", "sequence": 1}


def _pieces(array: Array) -> list[bytes | Array]:
    laid = laid_out("x", array.dtype, array.shape, pieces=[array])
    return record_pieces(RecordType.TRANSITIONS, key="k", fields=FIELDS, arrays=[laid])


def _plain(array: Array) -> bytearray:
    return prepare_record(RecordType.TRANSITIONS, key="k", fields=FIELDS, arrays={"x": [array]})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100, dtype=np.int32),
        np.arange(100, dtype=np.int32)[::3],
        np.arange(0, dtype=np.int32),
        np.arange(2**19, dtype=np.int32),
    ],
    ids=["whole", "with gaps", "empty", "above the largest block"],
)
def test_log_record_in_lent_memory_has_the_same_bytes(array: Array) -> None:
    memory = RecordMemory(MemoryBlocks())
    for _ in range(3):
        # What an earlier record left in the memory does not show.
        memory.joined(_pieces(np.full(3000, 7, np.int32)))
        assert memory.joined(_pieces(array)) == _plain(array)
        memory.take_back()


def test_log_records_of_one_commit_do_not_share_memory() -> None:
    memory = RecordMemory(MemoryBlocks())
    arrays = [np.full(50, number, np.int32) for number in range(150)]
    for _ in range(2):
        records = [memory.joined(_pieces(array)) for array in arrays]
        assert records == [_plain(array) for array in arrays]
        memory.take_back()


@pytest.mark.parametrize(("count", "size"), [(200, 100), (20, MAX_BYTES // 4)])
def test_log_memory_of_a_large_commit_is_lent_again(count: int, size: int) -> None:
    """Also that of many records, and of full ones."""
    memory = RecordMemory(MemoryBlocks())
    lent: list[set[int]] = []
    held: list[Array] = []
    for _ in range(2):
        records = [memory.joined(_pieces(np.full(size, n, np.int32))) for n in range(count)]
        lent.append({np.frombuffer(record, np.uint8).ctypes.data for record in records})
        # Other memory cannot come to lie where these were.
        held += [np.empty(size, np.int32) for _ in range(count)]
        del records
        memory.take_back()
    assert lent[0] == lent[1]
    assert len(lent[0]) == count


def test_log_memory_is_lent_again() -> None:
    memory = RecordMemory(MemoryBlocks())
    addresses: set[int] = set()
    for _ in range(5):
        record = memory.joined(_pieces(np.arange(50, dtype=np.int32)))
        addresses.add(np.frombuffer(record, np.uint8).ctypes.data)
        memory.take_back()
    assert len(addresses) == 1


def test_log_memory_that_somebody_looks_at_is_not_written_over() -> None:
    memory = RecordMemory(MemoryBlocks())
    view = memoryview(memory.joined(_pieces(np.arange(50, dtype=np.int32))))
    memory.take_back()
    with pytest.raises(BufferError):
        memory.joined(_pieces(np.zeros(50, np.int32)))
    assert view == _plain(np.arange(50, dtype=np.int32))


def test_log_memory_whose_views_a_profiler_has_collected_is_lent_again() -> None:
    memory = RecordMemory(MemoryBlocks())
    memory.joined(_pieces(np.arange(50, dtype=np.int32)))
    tracked = gc.get_objects()
    memory.take_back()
    assert memory.joined(_pieces(np.zeros(50, np.int32))) == _plain(np.zeros(50, np.int32))
    del tracked
