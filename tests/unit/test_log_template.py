"""Records from a template: the same as those that are packed one by one."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.record_types import RecordType
from perdure.experience.format import (
    Stamp,
    parse_record,
    prepare_record,
    record_arrays,
    record_body,
    stamp_record,
)
from perdure.experience.template import RecordTemplate, Slot

STAMP = Stamp(incarnation=3, last_of_batch=True, lsn=9, durable_upto=128, other_durable_lsn=4)
SHAPE: dict[str, Any] = {
    "session": [Slot.UINT64, Slot.UINT32],
    "why": "stop",
    "parts": {"a": Slot.FLOAT64, "ä": Slot.FLOAT64},
}


def _read(record: bytearray) -> tuple[dict[str, Any], memoryview]:
    stamp_record(record, STAMP)
    view = memoryview(record)
    header = parse_record(view, 0, where="test")
    assert header is not None
    assert header.length == len(record)
    return record_body(view, 0, header), view


@given(
    numbers=st.tuples(
        st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.floats(), st.floats()
    ),
    key=st.text(),
    padding=st.text(max_size=70),
)
def test_log_template_packs_what_the_encoder_packs(
    numbers: tuple[int, int, float, float], key: str, padding: str
) -> None:
    group, index, first, second = numbers
    fields = {"session": [group, index], "why": padding, "parts": {"a": first, "ä": second}}
    template = RecordTemplate(RecordType.CLOSED, SHAPE | {"why": padding})
    filled, _ = _read(template.fill(key, numbers))
    plain = prepare_record(RecordType.CLOSED, key=key, fields=fields)
    packed, view = _read(plain)
    assert msgpack.packb(filled) == msgpack.packb(packed)
    record = template.fill(key, numbers)
    assert record[:8] == view[:8]
    assert record[48:56] == view[48:56], "the hash of the key"


@given(lengths=st.tuples(st.integers(0, 100), st.integers(0, 100)))
def test_log_template_lays_arrays_where_the_encoder_lays_them(lengths: tuple[int, int]) -> None:
    arrays = {
        "a": np.arange(lengths[0], dtype=np.int32),
        "b": np.arange(lengths[1], dtype=np.uint8),
    }
    signature = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
    template = RecordTemplate(RecordType.TRAJECTORY, {"n": Slot.UINT64}, arrays=signature)
    raws = [array.tobytes() for array in arrays.values()]
    fields, view = _read(template.fill("k", [7], raws))
    assert fields["n"] == 7
    found = record_arrays(view, 0, fields)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert [entry[3] % 64 for entry in fields["arrays"]] == [0, 0]


def test_log_template_refuses_what_does_not_fit() -> None:
    template = RecordTemplate(RecordType.CLOSED, SHAPE)
    for wrong in ([1, 2, 3.0], [1, 2, 3.0, 4.0, 5.0]):
        with pytest.raises(ValueError, match="size"):
            template.fill("k", wrong)
    for number in (-1, 2**32):
        with pytest.raises(struct.error):
            template.fill("k", [1, number, 0.0, 0.0])
    with pytest.raises(ValueError, match="size"):
        template.fill("k", [1, 2, 0.0, 0.0], [b"array"])
