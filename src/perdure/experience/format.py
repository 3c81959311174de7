"""One log record as bytes (``docs/formats/log.md``): building, stamping, parsing, array views.

A record is prepared where it is appended (everything that depends on its content) and stamped when
it is committed (everything that depends on where it lands), so that a failed write is retried
without encoding anything again.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np
import xxhash

from perdure.core.errors import FutureFormatError
from perdure.core.ids import PayloadRef
from perdure.core.record_types import RecordType
from perdure.core.trajectories import Array

MAGIC = b"PLOG"
FORMAT_VERSION = 1
ALIGNMENT = 64
HEADER_BYTES = 64
LAST_OF_BATCH = 1

_HEADER = struct.Struct("<4sHHIIIIQQQQQ")
_HEAD = struct.Struct("<4sHHII")
_KEY_HASH = struct.Struct("<Q")
_KEY_HASH_AT = 48
_STAMP = struct.Struct("<IIQQQ")
_STAMP_AT = 16
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = 56
_NO_CHECKSUM = bytes(8)
_ZEROS = bytes(ALIGNMENT)
_EXTENT = struct.Struct(">BIBI")
_REFERENCE = struct.Struct(">BBIBIBQBQBQ")
_NO_REFERENCE = bytes(_REFERENCE.size)
_UINT32, _UINT64, _ARRAY_OF_5 = 0xCE, 0xCF, 0x95
_MAX_ARRAY_BYTES = 2**32
_KNOWN_TYPES = frozenset(int(number) for number in RecordType)


class RecordHeader(NamedTuple):
    """The header of a record; ``length`` is the whole record in bytes."""

    type: int
    length: int
    fields_length: int
    incarnation: int
    flags: int
    lsn: int
    durable_upto: int
    other_durable_lsn: int
    key_hash: int
    checksum: int

    @property
    def last_of_batch(self) -> bool:
        return bool(self.flags & LAST_OF_BATCH)


class Stamp(NamedTuple):
    """What a record learns at commit time."""

    incarnation: int
    last_of_batch: bool
    lsn: int
    durable_upto: int
    other_durable_lsn: int


def prepare_record(
    record_type: RecordType,
    *,
    key: str,
    fields: Mapping[str, object],
    arrays: Mapping[str, Array] | None = None,
) -> bytearray:
    """Build a record without its stamp. The arrays are copied, little-endian.

    Raises:
        TypeError: A field is not msgpack-able.
        ValueError: The arrays take 4 GiB or more.
    """
    if arrays is None:
        return _join(record_type, key, _pack(fields), [])
    # The offsets depend on the length of the fields that list them: they get a fixed width.
    open_fields = _pack({**fields, "arrays": None})[:-1] + _array_header(len(arrays))
    raws = [(_array_head(name, a.dtype, a.shape), _raw(a)) for name, a in arrays.items()]
    fields_length = len(open_fields) + sum(len(head) + _EXTENT.size for head, _ in raws)
    offset = _aligned(HEADER_BYTES + fields_length)
    packed = [open_fields]
    pieces: list[bytes] = []
    for head, raw in raws:
        size = len(raw)
        if offset + size >= _MAX_ARRAY_BYTES:
            raise ValueError(f"the arrays of record {key} take 4 GiB or more")
        packed += (head, _EXTENT.pack(_UINT32, offset, _UINT32, size))
        padding = -size % ALIGNMENT
        pieces += (raw, _ZEROS[:padding])
        offset += size + padding
    return _join(record_type, key, b"".join(packed), pieces)


def prepare_referring_record(
    record_type: RecordType, *, key: str, fields: Mapping[str, object]
) -> bytearray:
    """Build a record whose field ``payload`` is left open for :func:`set_reference`."""
    reordered = dict(fields)
    del reordered["payload"]
    reordered["payload"] = None
    return _join(record_type, key, _pack(reordered)[:-1] + _NO_REFERENCE, [])


def set_reference(record: bytearray, ref: PayloadRef) -> None:
    """Fill in the reference that :func:`prepare_referring_record` left open."""
    end = HEADER_BYTES + int.from_bytes(record[12:16], "little")
    _REFERENCE.pack_into(
        record,
        end - _REFERENCE.size,
        _ARRAY_OF_5,
        _UINT32,
        ref.incarnation,
        _UINT32,
        ref.segment,
        _UINT64,
        ref.offset,
        _UINT64,
        ref.length,
        _UINT64,
        ref.checksum,
    )


def stamp_record(record: bytearray, stamp: Stamp) -> int:
    """Write the stamp and the checksum into a prepared record; return the checksum."""
    _STAMP.pack_into(
        record,
        _STAMP_AT,
        stamp.incarnation,
        LAST_OF_BATCH if stamp.last_of_batch else 0,
        stamp.lsn,
        stamp.durable_upto,
        stamp.other_durable_lsn,
    )
    _CHECKSUM.pack_into(record, _CHECKSUM_AT, 0)
    checksum = xxhash.xxh3_64_intdigest(record)
    _CHECKSUM.pack_into(record, _CHECKSUM_AT, checksum)
    return checksum


def decode_header(view: memoryview, offset: int) -> RecordHeader | None:
    """The header at ``offset``, or None if no record of a sane length can start there.

    Nothing is verified but magic and lengths; the version is not looked at.
    """
    if offset + HEADER_BYTES > len(view):
        return None
    values = _HEADER.unpack_from(view, offset)
    length = values[3] * ALIGNMENT
    if values[0] != MAGIC or length < HEADER_BYTES or offset + length > len(view):
        return None
    if HEADER_BYTES + values[4] > length:
        return None
    return RecordHeader(values[2], length, *values[4:])


def parse_record(view: memoryview, offset: int, *, where: str) -> RecordHeader | None:
    """The header of the *valid* record at ``offset``, or None if there is none.

    Raises:
        FutureFormatError: A valid record of a newer version, of unknown type or with unknown flags.
    """
    header = decode_header(view, offset)
    if header is None or not checksum_holds(view, offset, header):
        return None
    version = int.from_bytes(view[offset + 4 : offset + 6], "little")
    if version != FORMAT_VERSION or header.type not in _KNOWN_TYPES or header.flags > LAST_OF_BATCH:
        raise FutureFormatError(
            f"record at byte {offset} (version {version}, type {header.type}, flags {header.flags})"
            f" is not of format {FORMAT_VERSION}",
            where=where,
            way_out="use the perdure version that wrote the run, or a newer one",
        )
    return header


def checksum_holds(view: memoryview, offset: int, header: RecordHeader) -> bool:
    """Whether the bytes of the record have the checksum in its header."""
    state = xxhash.xxh3_64(view[offset : offset + _CHECKSUM_AT])
    state.update(_NO_CHECKSUM)
    state.update(view[offset + HEADER_BYTES : offset + header.length])
    return state.intdigest() == header.checksum


def record_body(view: memoryview, offset: int, header: RecordHeader) -> dict[str, Any]:
    """The fields of a valid record. Raises ``ValueError`` if they are not a msgpack map."""
    start = offset + HEADER_BYTES
    fields: object = msgpack.unpackb(view[start : start + header.fields_length])
    if not isinstance(fields, dict):
        raise ValueError(f"the fields of the record at byte {offset} are not a map")
    return cast("dict[str, Any]", fields)


def record_arrays(view: memoryview, offset: int, fields: Mapping[str, Any]) -> dict[str, Array]:
    """Views (no copy, read-only if the memory is) of the arrays of a valid payload record."""
    data = np.frombuffer(view, np.uint8)
    arrays: dict[str, Array] = {}
    for name, dtype, shape, at, length in fields["arrays"]:
        raw = data[offset + at : offset + at + length]
        arrays[name] = raw.view(np.dtype(dtype)).reshape(shape)
    return arrays


def _join(record_type: RecordType, key: str, packed: bytes, arrays: list[bytes]) -> bytearray:
    padding = _ZEROS[: -len(packed) % ALIGNMENT]
    record = bytearray().join((_ZEROS, packed, padding, *arrays))
    _HEAD.pack_into(
        record, 0, MAGIC, FORMAT_VERSION, record_type, len(record) // ALIGNMENT, len(packed)
    )
    _KEY_HASH.pack_into(record, _KEY_HASH_AT, xxhash.xxh3_64_intdigest(key.encode()))
    return record


@functools.lru_cache(maxsize=4096)
def _array_head(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The start of an entry of ``arrays``: an array of five, of which three are here."""
    return b"\x95" + _pack([name, dtype.newbyteorder("<").str, shape])[1:]


@functools.cache
def _array_header(count: int) -> bytes:
    return _pack([None] * count)[: -count or None]


def _raw(array: Array) -> bytes:
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes()


def _pack(value: object) -> bytes:
    return msgpack.packb(value)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
