"""File images: where every tensor of a checkpoint lies in its file, and every file in the arena.

An image is a safetensors file: 8 bytes little-endian header length, a JSON header padded with
spaces so that the data starts at a multiple of 4096, then the tensors without gaps. Tensors are
ordered by falling element size, then by name, so that each is naturally aligned.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perdure.checkpoint.dtypes import item_size

RESERVED = "__metadata__"
"""The one name that safetensors leaves to nobody's tensor."""
ALIGNMENT = 4096
"""Bytes; data inside a file and files inside an arena start at multiples of it."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element code and shape of a tensor."""

    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_size(self.code)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor inside its file: bytes ``start`` to ``end`` of the data part."""

    name: str
    spec: TensorSpec
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileImage:
    """One tensor file: its header, its tensors and its first byte in the arena."""

    path: str
    header: bytes
    places: tuple[TensorPlace, ...]
    arena_offset: int

    @property
    def data_offset(self) -> int:
        """First byte of the data part in the arena."""
        return self.arena_offset + len(self.header)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + (self.places[-1].end if self.places else 0)

    @property
    def blocks_size(self) -> int:
        """Bytes of the arena that are the file's: its size in whole blocks."""
        return _aligned(self.size)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """All images of one checkpoint and the arena bytes they need."""

    images: tuple[FileImage, ...]
    size: int


def plan(files: Mapping[str, Mapping[str, TensorSpec]]) -> ArenaLayout:
    """Lay out files (path → tensor name → spec), each at the next aligned place of the arena."""
    images: list[FileImage] = []
    offset = 0
    for path, specs in files.items():
        places = tuple(_places(specs))
        image = FileImage(path, _encode_header(places), places, offset)
        images.append(image)
        offset += image.blocks_size
    return ArenaLayout(tuple(images), offset)


def parse_header(data: bytes, *, file_size: int) -> tuple[int, tuple[TensorPlace, ...]]:
    """Read a header back: the offset of the data part in the file, and the tensors.

    Args:
        data: The file's first bytes, at least the whole header.
        file_size: Bytes of the file; the tensors must fill it exactly.

    Raises:
        ValueError: Not a safetensors header, or one that does not fit the file.
    """
    if len(data) < _LENGTH.size:
        raise ValueError("shorter than a header")
    (length,) = _LENGTH.unpack_from(data)
    data_offset = _LENGTH.size + length
    if data_offset > len(data):
        raise ValueError("header is longer than the file")
    entries = json.loads(data[_LENGTH.size : data_offset])
    entries.pop(RESERVED, None)
    places = sorted(
        (_parse_place(name, entry) for name, entry in entries.items()),
        key=lambda place: (place.start, place.end),
    )
    end = 0
    for place in places:
        if place.start != end or place.end - place.start != place.spec.nbytes:
            raise ValueError(f"tensor {place.name!r} does not lie where its shape says")
        end = place.end
    if data_offset + end != file_size:
        raise ValueError("tensors do not fill the file")
    return data_offset, tuple(places)


def _parse_place(name: str, entry: Mapping[str, object]) -> TensorPlace:
    try:
        start, end = (int(number) for number in _list(entry["data_offsets"]))
        shape = tuple(int(number) for number in _list(entry["shape"]))
        spec = TensorSpec(str(entry["dtype"]), shape)
        item_size(spec.code)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tensor {name!r} has no readable entry ({error})") from error
    return TensorPlace(name, spec, start, end)


def _list(value: object) -> list[int]:
    if not isinstance(value, list):
        raise TypeError(f"not a list: {value!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _places(specs: Mapping[str, TensorSpec]) -> Iterable[TensorPlace]:
    start = 0
    for name in sorted(specs, key=lambda name: (-item_size(specs[name].code), name)):
        end = start + specs[name].nbytes
        yield TensorPlace(name, specs[name], start, end)
        start = end


def _encode_header(places: Iterable[TensorPlace]) -> bytes:
    entries = {
        place.name: {
            "dtype": place.spec.code,
            "shape": list(place.spec.shape),
            "data_offsets": [place.start, place.end],
        }
        for place in places
    }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(_aligned(_LENGTH.size + len(text)) - _LENGTH.size, b" ")
    return _LENGTH.pack(len(padded)) + padded


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
