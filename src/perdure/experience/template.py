"""Records of a known shape: laid out once, filled in again and again.

Packing the same map for every session costs more than everything else its record needs. A template
holds the record as it will be, with gaps of a fixed width where the numbers go.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence

import msgpack

from perdure.core.record_types import RecordType
from perdure.experience.format import (
    HEADER_BYTES,
    ArraySignature,
    array_layout,
    key_hash,
    open_header,
    padding,
)

_PACKER = msgpack.Packer()


class Slot(enum.Enum):
    """A number that is filled in later: its msgpack type byte and its ``struct`` code."""

    UINT32 = (b"\xce", "I")
    UINT64 = (b"\xcf", "Q")
    FLOAT64 = (b"\xcb", "d")


_KEY_HASH_CODE = "8s"

Shape = Slot | str | None | list["Shape"] | dict[str, "Shape"]
"""msgpack-able, with slots; None is left out, for the last field to be added by hand."""


class RecordTemplate:
    """Builds records of one type whose fields and arrays have one shape.

    Args:
        fields: The fields but for ``arrays``, in their order.
        arrays: Name, little-endian dtype and shape of each array; empty: the record has no arrays.
    """

    def __init__(
        self, record_type: RecordType, fields: dict[str, Shape], *, arrays: ArraySignature = ()
    ) -> None:
        literals, codes = _split({**fields, "arrays": None} if arrays else fields)
        self._pieces = [b""]
        self._length = 0
        if arrays:
            layout = array_layout(arrays, struct.calcsize(_code(literals, codes)))
            literals[-1] += layout.listing
            self._pieces += layout.pieces
            self._length = layout.end
        fields_length = struct.calcsize(_code(literals, codes))
        literals[-1] += padding(fields_length)
        self._length = self._length or HEADER_BYTES + struct.calcsize(_code(literals, codes))
        before, after = open_header(record_type, self._length, fields_length)
        literals = [before, after + literals[0], *literals[1:]]
        self._struct = struct.Struct(_code(literals, [_KEY_HASH_CODE, *codes]))
        self._parts: list[bytes | float] = [0] * (2 * len(literals) - 1)
        self._parts[::2] = literals

    def fill(self, key: str, numbers: Iterable[float], arrays: Sequence[bytes] = ()) -> bytearray:
        """A record without its stamp.

        Args:
            numbers: One for each slot, in their order.
            arrays: The bytes of each array, little-endian.

        Raises:
            ValueError: There are more or fewer numbers than slots, or arrays than there should be.
            struct.error: A number does not fit its slot.
        """
        parts = self._parts.copy()
        parts[1::2] = (key_hash(key), *numbers)
        pieces = self._pieces.copy()
        pieces[0] = self._struct.pack(*parts)
        pieces[1::2] = arrays
        record = bytearray().join(pieces)
        assert len(record) == self._length
        return record


def _split(shape: Shape) -> tuple[list[bytes], list[str]]:
    """What lies before, between and behind the slots, and the codes of the slots."""
    literals = [b""]
    codes: list[str] = []
    for piece in _pieces(shape):
        if isinstance(piece, Slot):
            marker, code = piece.value
            literals[-1] += marker
            codes.append(code)
            literals.append(b"")
        else:
            literals[-1] += piece
    return literals, codes


def _code(literals: Sequence[bytes], codes: Sequence[str]) -> str:
    """The ``struct`` format of literals with slots between them."""
    pairs = zip(literals, [*codes, ""], strict=True)
    return ">" + "".join([f"{len(literal)}s{code}" for literal, code in pairs])


def _pieces(shape: Shape) -> Iterator[bytes | Slot]:
    if isinstance(shape, Slot):
        yield shape
    elif isinstance(shape, dict):
        yield _PACKER.pack_map_header(len(shape))
        for name, value in shape.items():
            yield msgpack.packb(name)
            yield from _pieces(value)
    elif isinstance(shape, list):
        yield _PACKER.pack_array_header(len(shape))
        for value in shape:
            yield from _pieces(value)
    elif shape is not None:
        yield msgpack.packb(shape)
