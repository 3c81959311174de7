"""One log record as bytes (``docs/formats/log.md``): building, stamping, parsing, array views.

A record is prepared where it is appended (everything that depends on its content) and stamped when
it is committed (everything that depends on where it lands), so that a failed write is retried
without encoding anything again.
"""

from __future__ import annotations

import math
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgpack
import msgspec
import numpy as np
import xxhash

from perdure.core.errors import FutureFormatError
from perdure.core.ids import PayloadRef
from perdure.core.record_types import RecordType
from perdure.core.trajectories import Array
from perdure.experience.commit_checksums import checksum_held

MAGIC = b"PLOG"
FORMAT_VERSION = 1
ALIGNMENT = 64
HEADER_BYTES = 64
LAST_OF_BATCH = 1

_HEADER = struct.Struct("<4sHHIIIIQQQQQ")
_HEAD = struct.Struct("<4sHHII")
_KEY_HASH = struct.Struct("<Q")
_STAMP = struct.Struct("<IIQQQ")
_STAMP_AT = 16
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = 56
_NO_CHECKSUM = bytes(8)
_NO_STAMP = bytes(32)
_ZEROS = bytes(ALIGNMENT)
_SMALL_BYTES = 2**12
"""To copy a record up to this size takes less time than to hash it in pieces."""
_EXTENT = struct.Struct(">BIBI")
_REFERENCE = struct.Struct(">BBIBIBQBQBQ")
_NO_REFERENCE = bytes(_REFERENCE.size)
_UINT32, _UINT64 = 0xCE, 0xCF
_ARRAY_OF_5 = b"\x95"
_IS_LITTLE = sys.byteorder == "little"
_UINT32_MAX = _MAX_BYTES = 2**32 - 1


class _Packer(threading.local):
    """A packer for each thread: a new one for each value would cost more than most values."""

    def __init__(self) -> None:
        self.pack: Callable[[object], bytes] = msgpack.Packer().pack


_packer = _Packer()
pack_plain: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
"""The bytes that msgpack gives, sooner.

For numbers, text, lists, tuples and maps whose types are just these (names in maps may be of
subclasses): another type, which msgpack refuses, may be taken for one of them, a set for a list.
"""


def _pack(value: object) -> bytes:
    """Raises ``TypeError``, ``ValueError`` or ``OverflowError`` for what is not msgpack-able."""
    return _packer.pack(value)


Record = bytearray | memoryview
"""A record that is prepared; its stamp is still to be written."""

_KNOWN_TYPES = frozenset(int(number) for number in RecordType)


def record_length(pieces: Sequence[bytes | Array]) -> int:
    """Bytes of a record, as the header in its first piece says."""
    head = pieces[0]
    assert isinstance(head, bytes)
    return int.from_bytes(head[8:12], "little") * ALIGNMENT


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
    record_type: int,
    *,
    key: str,
    fields: Mapping[str, object],
    arrays: Mapping[str, Sequence[Array]] | None = None,
) -> bytearray:
    """Build a record without its stamp. The arrays are copied, little-endian.

    Args:
        arrays: Each in pieces of one dtype, at least one, that follow one another along the first
            axis.

    Raises:
        TypeError: A field is not msgpack-able.
        ValueError: The record would take 4 GiB or more.
    """
    if arrays is None:
        return joined(_pieces(record_type, key, _pack(fields), []))
    laid = [_lay_out(name, pieces) for name, pieces in arrays.items()]
    return joined(record_pieces(record_type, key=key, fields=fields, arrays=laid))


def record_pieces(
    record_type: int,
    *,
    key: str,
    fields: Mapping[str, object],
    arrays: Sequence[LaidOut],
    pack: Callable[[object], bytes] = _pack,
) -> list[bytes | Array]:
    """What :func:`prepare_record` joins, nothing copied; raises what it raises."""
    open_fields = pack({**fields, "arrays": None})[:-1]
    packed = open_fields + _list_arrays(arrays, len(open_fields))
    return _pieces(record_type, key, packed, arrays)


def prepare_referring_record(
    record_type: RecordType, *, key: str, fields: dict[str, object]
) -> bytearray:
    """Build a record whose field ``payload`` is left open for :func:`set_reference`.

    It becomes the last of the fields. All others are plain (:func:`pack_plain`).
    """
    del fields["payload"]
    fields["payload"] = None
    return joined(_pieces(record_type, key, pack_plain(fields)[:-1] + _NO_REFERENCE, []))


def set_reference(record: Record, ref: PayloadRef) -> None:
    """Fill in the reference of a record whose last field is ``payload``.

    :func:`prepare_referring_record` left room for it.
    """
    end = HEADER_BYTES + int.from_bytes(record[12:16], "little")
    _REFERENCE.pack_into(
        record,
        end - _REFERENCE.size,
        _ARRAY_OF_5[0],
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


def stamp_record(record: Record, stamp: Stamp) -> int:
    """Write the stamp and the checksum into a prepared record; return the checksum."""
    _STAMP.pack_into(record, _STAMP_AT, *stamp)
    _CHECKSUM.pack_into(record, _CHECKSUM_AT, 0)
    checksum = checksum_held(record)
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
    return RecordHeader._make((values[2], length, *values[4:]))


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
            rule="a format is read by the version that wrote it and by later ones",
            way_out="use the perdure version that wrote the run, or a newer one",
        )
    return header


def checksum_holds(view: memoryview, offset: int, header: RecordHeader) -> bool:
    """Whether the bytes of the record have the checksum in its header."""
    if header.length <= _SMALL_BYTES:
        copy = bytearray(view[offset : offset + header.length])
        _CHECKSUM.pack_into(copy, _CHECKSUM_AT, 0)
        return xxhash.xxh3_64_intdigest(copy) == header.checksum
    state = xxhash.xxh3_64(view[offset : offset + _CHECKSUM_AT])
    state.update(_NO_CHECKSUM)
    state.update(view[offset + HEADER_BYTES : offset + header.length])
    return state.intdigest() == header.checksum


def record_body(
    view: memoryview, offset: int, header: RecordHeader, *, tuples: bool = False
) -> dict[str, Any]:
    """The fields of a valid record; lists of them as ``tuples`` on request.

    Raises:
        ValueError: They are not a msgpack map.
    """
    start = offset + HEADER_BYTES
    packed = view[start : start + header.fields_length]
    fields: object = msgpack.unpackb(packed, use_list=not tuples)
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


def _pieces(
    record_type: int, key: str, packed: bytes, arrays: Sequence[LaidOut]
) -> list[bytes | Array]:
    """Header without a stamp, fields, arrays, each with the zeros behind it."""
    size = _aligned(HEADER_BYTES + len(packed)) + sum([_aligned(array.size) for array in arrays])
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, record_type, size // ALIGNMENT, len(packed))
    key_hash = _KEY_HASH.pack(xxhash.xxh3_64_intdigest(key.encode()))
    pieces: list[bytes | Array] = [head + _NO_STAMP + key_hash + _NO_CHECKSUM + packed]
    pieces.append(padding(len(packed)))
    for array in arrays:
        pieces += array.pieces
        pieces.append(padding(array.size))
    return pieces


def joined(pieces: Sequence[bytes | Array]) -> bytearray:
    """The bytes of all pieces, one behind the other."""
    # The types of numpy do not tell that arrays are buffers.
    buffers: Any = pieces
    try:
        return bytearray().join(buffers)
    except TypeError:
        # To look beforehand at whether every piece is contiguous would take longer than to copy it.
        return bytearray().join(cast("Sequence[bytes]", contiguous(pieces)))


def contiguous(pieces: Sequence[bytes | Array]) -> list[bytes | Array]:
    """The same bytes, the arrays that have gaps copied."""
    return [p if isinstance(p, bytes) else np.ascontiguousarray(p) for p in pieces]


def padding(length: int) -> bytes:
    """The zeros behind ``length`` bytes."""
    return _ZEROS[: -length % ALIGNMENT]


class LaidOut(NamedTuple):
    """An array to be written: what the listing says of it, its bytes, and their number."""

    listed: bytes
    pieces: Sequence[Array]
    size: int


def _lay_out(name: str, pieces: Sequence[Array]) -> LaidOut:
    first = pieces[0]
    dtype = _little_endian(first.dtype)
    if [piece.dtype for piece in pieces].count(dtype) < len(pieces):
        pieces = [piece.astype(dtype, casting="equiv", copy=False) for piece in pieces]
    shape = first.shape
    if len(pieces) > 1:
        shape = (sum(map(len, pieces)), *shape[1:])
    return laid_out(name, dtype, shape, pieces=pieces)


def laid_out(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, pieces: Sequence[Array]
) -> LaidOut:
    """An array whose pieces, little-endian and of this dtype, have this shape together."""
    listed = _ARRAY_OF_5 + pack_plain([name, dtype.str, shape])[1:]
    return LaidOut(listed, pieces, math.prod(shape) * dtype.itemsize)


def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    # A new object for the same type would be compared by its parts, not by identity.
    return dtype if dtype.isnative and _IS_LITTLE else dtype.newbyteorder("<")


def _list_arrays(arrays: Sequence[LaidOut], open_length: int) -> bytes:
    """The value of the field ``arrays``, packed, behind ``open_length`` bytes of other fields."""
    # The offsets depend on the length of the fields that list them: they get a fixed width.
    head = pack_plain([None] * len(arrays))[: -len(arrays) or None]
    listed = len(head) + sum([len(array.listed) + _EXTENT.size for array in arrays])
    offset = _aligned(HEADER_BYTES + open_length + listed)
    listing = [head]
    for array in arrays:
        # An offset that does not fit is refused below, by the end of the record.
        extent = (_UINT32, offset & _UINT32_MAX, _UINT32, array.size & _UINT32_MAX)
        listing += (array.listed, _EXTENT.pack(*extent))
        offset = _aligned(offset + array.size)
    if offset > _MAX_BYTES:
        raise ValueError(f"a record would take {offset} bytes; at most {_MAX_BYTES} fit")
    return b"".join(listing)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
