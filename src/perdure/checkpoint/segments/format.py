"""The segment file: an index with a checksum of every block, then the columns.

    0   8 bytes  b"PERDSEG\\n"
    8   u32      format, 1
    12  u32      bytes of the index, these included; a multiple of 4096
    16  u32      bytes of the map
    20  map      msgpack, see :func:`encode_index`; zeros up to the end of the index
    then         every column at the next multiple of 4096, zeros between them

All integers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import numpy as np
import xxhash

from perdure.checkpoint.dtypes import NUMPY_BY_CODE, code_of
from perdure.checkpoint.layout import ALIGNMENT

MAGIC = b"PERDSEG\n"
FORMAT = 1
BLOCK_BYTES = 64 << 10
"""Bytes of a column that share a checksum: what has to be read before one row can be used."""

_HEAD = struct.Struct("<8sIII")

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """One column inside the file; ``offset`` counts from the end of the index."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    blocks: np.ndarray[Any, np.dtype[np.uint64]]
    """xxh3-64 of every block."""

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """What the index says."""

    component: str
    first: int
    rows: int
    bytes: int
    """Of the index itself."""
    block_bytes: int
    columns: Mapping[str, ColumnPlace]

    @property
    def file_bytes(self) -> int:
        ends = (place.offset + self.rows * place.row_bytes for place in self.columns.values())
        return self.bytes + max(ends, default=0)


def describe(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The stored twin of an element type. Raises ``ValueError`` if files cannot hold it."""
    code = code_of(dtype)
    if code is None:
        raise ValueError(f"elements of type {dtype} cannot be stored")
    return NUMPY_BY_CODE[code]


def raw_bytes(array: Array) -> Bytes:
    """The bytes of a contiguous array, without copying."""
    return array.reshape(-1).view(np.uint8)


def encode_index(component: str, first: int, rows: int, arrays: Mapping[str, Array]) -> bytes:
    """The index of a segment that holds these columns, contiguous and of stored types."""
    columns: list[list[Any]] = []
    offset = 0
    for name, array in arrays.items():
        code = code_of(array.dtype)
        assert code is not None
        assert array.flags.c_contiguous
        columns.append([name, code, list(array.shape[1:]), offset, _checksums(raw_bytes(array))])
        offset = aligned(offset + array.nbytes)
    packed = msgpack.packb(
        {
            "component": component,
            "first": first,
            "rows": rows,
            "block_bytes": BLOCK_BYTES,
            "columns": columns,
        }
    )
    size = aligned(_HEAD.size + len(packed))
    return (_HEAD.pack(MAGIC, FORMAT, size, len(packed)) + packed).ljust(size, b"\0")


def index_room(columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], rows: int) -> int:
    """Bytes that hold the index of so many rows, unless the component's name is very long."""
    room = _HEAD.size + 512
    for name, (dtype, shape) in columns.items():
        blocks = -(-rows * dtype.itemsize * math.prod(shape) // BLOCK_BYTES)
        room += len(name.encode()) + 9 * len(shape) + 8 * blocks + 64
    return aligned(room)


def decode_index(data: bytes) -> SegmentIndex:
    """Read an index back.

    Raises:
        ValueError: It is none, or of a newer format.
    """
    if len(data) < _HEAD.size:
        raise ValueError("shorter than an index")
    magic, version, size, length = _HEAD.unpack_from(data)
    if magic != MAGIC or version != FORMAT or size != len(data):
        raise ValueError(f"not a segment of format {FORMAT}")
    try:
        value = cast("dict[str, Any]", msgpack.unpackb(data[_HEAD.size : _HEAD.size + length]))
        places = [_place(item) for item in value["columns"]]
        return SegmentIndex(
            component=str(value["component"]),
            first=int(value["first"]),
            rows=int(value["rows"]),
            bytes=size,
            block_bytes=int(value["block_bytes"]),
            columns={place.name: place for place in places},
        )
    except (KeyError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"the index is not readable ({error})") from error


def index_bytes(head: bytes) -> int:
    """Bytes of the index whose first 20 bytes these are. Raises ``ValueError`` if it is none."""
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise ValueError("not a segment")
    return int(_HEAD.unpack_from(head)[2])


HEAD_BYTES = _HEAD.size


def pieces(index: bytes, arrays: Mapping[str, Array]) -> Iterator[memoryview]:
    """The bytes of the file, in order, without copying a column."""
    yield memoryview(index)
    end = 0
    for array in arrays.values():
        yield memoryview(bytes(aligned(end) - end))
        yield raw_bytes(array).data
        end = aligned(end) + array.nbytes


def aligned(size: int) -> int:
    """The next multiple of 4096."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def block_checksums(data: memoryview) -> list[int]:
    """Those of a column, or of whole blocks of one."""
    starts = range(0, data.nbytes, BLOCK_BYTES)
    return [xxhash.xxh3_64_intdigest(data[start : start + BLOCK_BYTES]) for start in starts]


def block_checksum(data: memoryview) -> int:
    """xxh3-64 of a block."""
    return xxhash.xxh3_64_intdigest(data)


def _checksums(data: Bytes) -> bytes:
    return np.array(block_checksums(data.data), "<u8").tobytes()


def _place(item: list[Any]) -> ColumnPlace:
    name, code, shape, offset, blocks = item
    return ColumnPlace(
        str(name),
        NUMPY_BY_CODE[code],
        tuple(int(number) for number in shape),
        int(offset),
        np.frombuffer(blocks, "<u8"),
    )
