"""Fields whose shape is known: packed once, filled in for each record.

Packing a map again and again costs more than everything else that a small record needs. A template
holds the packed map with gaps of a fixed width where the numbers go.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence

import msgpack

_PACKER = msgpack.Packer()


class Slot(enum.Enum):
    """A number that is filled in later: its msgpack type byte and its ``struct`` code."""

    UINT32 = (b"\xce", "I")
    UINT64 = (b"\xcf", "Q")
    FLOAT64 = (b"\xcb", "d")


Shape = Slot | str | None | list["Shape"] | dict[str, "Shape"]
"""msgpack-able, with slots."""


class FieldsTemplate:
    """Packs fields of one shape; integers always take the width of their slot.

    Attributes:
        size: Length of the packed fields in bytes.
    """

    def __init__(self, shape: dict[str, Shape]) -> None:
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
        layout = [f"{len(text)}s{code}" for text, code in zip(literals, [*codes, ""], strict=True)]
        self._struct = struct.Struct(">" + "".join(layout))
        self.size = self._struct.size
        self._parts: list[bytes | float] = [0] * (len(literals) + len(codes))
        self._parts[::2] = literals

    def fill(self, numbers: Sequence[float]) -> bytes:
        """The packed fields, with ``numbers`` in the slots in their order.

        Raises:
            ValueError: There are more or fewer numbers than slots.
            struct.error: A number does not fit its slot.
        """
        parts = self._parts.copy()
        parts[1::2] = numbers
        return self._struct.pack(*parts)


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
    else:
        yield msgpack.packb(shape)
