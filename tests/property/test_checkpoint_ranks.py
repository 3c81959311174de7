"""Slices of tensors that ranks have stored: whatever was cut how, any part is that of the whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.layout import TensorSpec
from perdure.checkpoint.reading import CheckedFile, StoredPiece, StoredTensor
from perdure.core.boxes import Box, box_on, tiling_problem

DTYPES = {"F32": np.float32, "U8": np.uint8, "F64": np.float64, "I16": np.int16}
CHUNK = 16


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))


@st.composite
def cuttings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The boxes of all ranks of a mesh, those that repeat another left out."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    axes = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    cuts = [draw(axes) for _ in mesh]
    places = itertools.product(*(range(size) for size in mesh))
    return [
        box_on(shape, mesh=mesh, coordinate=place, cuts=cuts)
        for place in places
        if not any(p for p, cut in zip(place, cuts, strict=True) if cut is None)
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box], str]:
    shape = draw(shapes())
    code = draw(st.sampled_from(sorted(DTYPES)))
    return shape, draw(cuttings(shape)), draw(cuttings(shape)), code


def stored(whole: np.ndarray[Any, Any], boxes: list[Box], code: str) -> StoredTensor:
    """The tensor in files of its own for every box, behind some other bytes."""
    pieces: list[StoredPiece] = []
    for index, box in enumerate(boxes):
        part = np.ascontiguousarray(whole[box.within(Box.whole(whole.shape))])
        before = b"." * (8 * index)
        data = np.frombuffer(before + part.tobytes(), np.uint8)
        chunks = tuple(
            xxhash.xxh3_128_hexdigest(data[start : start + CHUNK].tobytes())
            for start in range(0, data.nbytes, CHUNK)
        )
        entry = FileEntry(data.nbytes, CHUNK, chunks)
        file = CheckedFile(data, entry, where=f"file {index}")
        pieces.append(StoredPiece(box, file, len(before)))
    return StoredTensor(TensorSpec(code, whole.shape), tuple(pieces))


@given(cases())
def test_what_n_ranks_store_m_ranks_load(
    case: tuple[tuple[int, ...], list[Box], list[Box], str],
) -> None:
    shape, saved, loaded, code = case
    assert tiling_problem(shape, saved) == ""
    whole = np.arange(np.prod(shape)).reshape(shape).astype(DTYPES[code])
    tensor = stored(whole, saved, code)
    assert np.array_equal(tensor.load(), whole)
    for box in loaded:
        part = tensor.load(box)
        assert part.shape == box.sizes
        assert np.array_equal(part, whole[box.within(Box.whole(shape))])
    assert b"".join(block.tobytes() for block in tensor.blocks()) == whole.tobytes()


@given(cases(), st.data())
def test_any_run_of_elements_is_that_of_the_whole(
    case: tuple[tuple[int, ...], list[Box], list[Box], str], data: st.DataObject
) -> None:
    shape, saved, _, code = case
    whole = np.arange(np.prod(shape)).reshape(shape).astype(DTYPES[code])
    if not whole.size:
        return
    start = data.draw(st.integers(0, whole.size - 1))
    stop = data.draw(st.integers(start + 1, whole.size))
    found = stored(whole, saved, code).elements(start, stop)
    assert found.tobytes() == whole.reshape(-1)[start:stop].tobytes()


@given(cases(), st.data())
def test_a_part_too_few_and_a_part_too_many_are_found(
    case: tuple[tuple[int, ...], list[Box], list[Box], str], data: st.DataObject
) -> None:
    shape, saved, other, _ = case
    held = [box for box in saved if box.volume]
    if not held:
        return
    one = data.draw(st.sampled_from(held))
    assert "missing" in tiling_problem(shape, [box for box in saved if box is not one])
    more = data.draw(st.sampled_from([box for box in other if box.volume]))
    assert "overlap" in tiling_problem(shape, [*saved, more])
    outside = Box(tuple(o + s for o, s in zip(one.offsets, shape, strict=True)), one.sizes)
    assert "inside" in tiling_problem(shape, [*saved, outside])
