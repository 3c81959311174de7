"""One record as bytes: header, alignment, checksum, array views, newer versions."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from perdure.core.errors import FutureFormatError
from perdure.core.ids import IncarnationNumber, PayloadRef
from perdure.core.record_types import RecordType
from perdure.experience.format import (
    Stamp,
    pack_plain,
    parse_record,
    prepare_record,
    prepare_referring_record,
    record_arrays,
    record_body,
    set_reference,
    stamp_record,
)

STAMP = Stamp(incarnation=3, last_of_batch=True, lsn=9, durable_upto=128, other_durable_lsn=4)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats()
_FIELDS = st.dictionaries(st.text(), _SCALARS | st.lists(st.integers(0, 2**40)), max_size=20)
_DTYPES = st.sampled_from(["<i4", "<f4", "|u1", "<i8", ">i4", ">f8"])
_ARRAYS = st.dictionaries(
    st.text(min_size=1),
    _DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))),
    max_size=18,
)


def _pieces(arrays: dict[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Each array in up to three pieces."""
    return {
        name: [array] if array.ndim == 0 else [array[:1], array[1:3], array[3:]]
        for name, array in arrays.items()
    }


class _Name(str):
    __slots__ = ()


_PLAIN = st.recursive(
    _SCALARS | st.binary(),
    lambda some: (
        st.lists(some)
        | st.lists(some).map(tuple)
        | st.dictionaries(st.text() | st.text().map(_Name) | st.integers(0, 9), some)
    ),
)


@given(value=_PLAIN)
def test_the_quick_packer_gives_the_same_bytes(value: object) -> None:
    assert pack_plain(value) == msgpack.packb(value)


@pytest.mark.parametrize("value", ["\ud800", 2**64, np.int32(1), object()])
def test_the_quick_packer_refuses_what_the_other_refuses(value: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)) as refused:
        msgpack.packb([value])
    with pytest.raises(refused.type):
        pack_plain([value])


@pytest.mark.parametrize("value", [{1}, frozenset(), Stamp, bytes])
def test_log_record_of_something_else_than_plain_values_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        prepare_record(RecordType.STEP_DONE, key="k", fields={"metrics": value})
    with pytest.raises(TypeError):
        prepare_record(
            RecordType.TRANSITIONS, key="k", fields={"metrics": value}, arrays={"x": [np.ones(1)]}
        )


@given(fields=_FIELDS, arrays=_ARRAYS)
def test_log_record_round_trip(fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    fields.pop("arrays", None)
    record = prepare_record(RecordType.TRAJECTORIES, key="k", fields=fields, arrays=_pieces(arrays))
    checksum = stamp_record(record, STAMP)
    view = memoryview(bytes(64) + bytes(record) + bytes(64))

    header = parse_record(view, 64, where="test")

    assert header is not None
    assert header[3:9] == (3, 1, 9, 128, 4, xxhash.xxh3_64_intdigest(b"k"))
    assert (header.type, header.length, header.checksum) == (101, len(record), checksum)
    assert len(record) % 64 == 0
    body = record_body(view, 64, header)
    listed = body.pop("arrays")
    assert msgpack.packb(body) == msgpack.packb(fields)
    start = -(-(64 + header.fields_length) // 64) * 64
    for (name, array), entry in zip(arrays.items(), listed, strict=True):
        assert entry[:1] + entry[3:] == [name, start, array.nbytes]
        start = -(-(start + array.nbytes) // 64) * 64
    assert start == len(record)
    found = record_arrays(view, 64, {"arrays": listed})
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].shape == array.shape
        assert found[name].dtype.str[0] in "<|"


def test_log_record_layout_is_the_documented_one() -> None:
    record = prepare_record(RecordType.CLOSED, key="closed/3", fields={"incarnation": 3})
    stamp_record(record, STAMP)
    magic, version, number, units, fields_length = struct.unpack_from("<4sHHII", record)
    assert (magic, version, number, units) == (b"PLOG", 1, 19, len(record) // 64)
    assert struct.unpack_from("<IIQQQ", record, 16) == (3, 1, 9, 128, 4)
    assert msgpack.unpackb(record[64 : 64 + fields_length]) == {"incarnation": 3}
    blank = record[:56] + bytes(8) + record[64:]
    assert struct.unpack_from("<Q", record, 56)[0] == xxhash.xxh3_64_intdigest(bytes(blank))


def test_log_arrays_are_views_of_the_given_memory() -> None:
    array = np.arange(100, dtype=np.float32)
    record = prepare_record(RecordType.TRAJECTORIES, key="k", fields={}, arrays={"a": [array]})
    stamp_record(record, STAMP)
    memory = np.frombuffer(bytes(record), np.uint8)
    header = parse_record(memory.data, 0, where="test")
    assert header is not None
    found = record_arrays(memory.data, 0, record_body(memory.data, 0, header))["a"]
    assert np.shares_memory(found, memory)
    assert not found.flags.writeable
    assert (found.ctypes.data - memory.ctypes.data) % 64 == 0


@pytest.mark.parametrize("rows", [5, 16])
def test_log_pieces_that_are_not_contiguous_are_copied_in_order(rows: int) -> None:
    table = np.arange(rows * 8, dtype=np.int64).reshape(rows, 8)
    pieces = [table[:, ::2], table[:, 1::2]]
    record = prepare_record(RecordType.TRAJECTORIES, key="k", fields={}, arrays={"a": pieces})
    plain = {"a": [np.ascontiguousarray(piece) for piece in pieces]}
    assert record == prepare_record(RecordType.TRAJECTORIES, key="k", fields={}, arrays=plain)


def test_log_prepared_record_keeps_no_hold_on_the_arrays() -> None:
    array = np.arange(4, dtype=np.int32)
    record = prepare_record(RecordType.TRAJECTORIES, key="k", fields={}, arrays={"a": [array]})
    array[:] = -1
    stamp_record(record, STAMP)
    header = parse_record(memoryview(record), 0, where="test")
    assert header is not None
    found = record_arrays(memoryview(record), 0, record_body(memoryview(record), 0, header))
    np.testing.assert_array_equal(found["a"], [0, 1, 2, 3])


@given(
    numbers=st.tuples(*[st.integers(0, 2**32 - 1)] * 2, *[st.integers(0, 2**64 - 1)] * 3),
    extra=_FIELDS,
)
def test_log_reference_is_filled_in_later(
    numbers: tuple[int, int, int, int, int], extra: dict[str, Any]
) -> None:
    fields = {**extra, "payload": "placeholder", "last": 1}
    record = prepare_referring_record(RecordType.SESSIONS_DONE, key="k", fields=fields)
    set_reference(record, PayloadRef(IncarnationNumber(numbers[0]), *numbers[1:]))
    stamp_record(record, STAMP)
    header = parse_record(memoryview(record), 0, where="test")
    assert header is not None
    body = record_body(memoryview(record), 0, header)
    assert body.pop("payload") == list(numbers)
    assert msgpack.packb(body) == msgpack.packb({k: fields[k] for k in fields if k != "payload"})


def test_log_stamping_again_replaces_the_stamp() -> None:
    record = prepare_record(RecordType.CLOSED, key="k", fields={"incarnation": 1})
    stamp_record(record, STAMP)
    first = bytes(record)
    stamp_record(record, STAMP._replace(lsn=10, last_of_batch=False))
    assert bytes(record) != first
    stamp_record(record, STAMP)
    assert bytes(record) == first


def test_log_every_flipped_bit_of_a_record_is_noticed() -> None:
    arrays = {"a": [np.arange(9, dtype=np.int32)]}
    record = prepare_record(RecordType.TRAJECTORIES, key="k", fields={"s": [1, 2]}, arrays=arrays)
    stamp_record(record, STAMP)
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        assert parse_record(memoryview(record), 0, where="test") is None
        record[bit // 8] ^= 1 << bit % 8
    assert parse_record(memoryview(record), 0, where="test") is not None


@pytest.mark.parametrize(
    ("offset", "value"),
    [(4, b"\x02\x00"), (6, b"\x63\x00"), (20, b"\x03\x00")],
    ids=["version", "type", "flags"],
)
def test_log_valid_record_of_a_newer_writer_is_refused(offset: int, value: bytes) -> None:
    record = prepare_record(RecordType.CLOSED, key="k", fields={"incarnation": 1})
    stamp_record(record, STAMP)
    record[offset : offset + 2] = value
    record[56:64] = bytes(8)
    record[56:64] = xxhash.xxh3_64_intdigest(record).to_bytes(8, "little")
    with pytest.raises(FutureFormatError, match=r"file at|not of format 1"):
        parse_record(memoryview(record), 0, where="file")


@pytest.mark.parametrize("length", [0, 1, 63, 64, 127])
def test_log_record_cut_short_is_none(length: int) -> None:
    record = prepare_record(RecordType.CLOSED, key="k", fields={"incarnation": 1})
    stamp_record(record, STAMP)
    assert parse_record(memoryview(record)[:length], 0, where="test") is None


def test_log_field_that_cannot_be_stored_is_refused_at_once() -> None:
    with pytest.raises(TypeError):
        prepare_record(RecordType.CLOSED, key="k", fields={"incarnation": object()})
