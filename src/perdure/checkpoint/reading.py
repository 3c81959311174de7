"""Reading a checkpoint: its files, checked before they are first used, and the tensors in them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import xxhash

from perdure.checkpoint.arena import shaped
from perdure.checkpoint.dtypes import NUMPY_BY_CODE, item_size
from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.layout import FileImage, TensorPlace, TensorSpec, parse_header, plan
from perdure.checkpoint.manifest import (
    EXPERIENCE_FILE,
    STATE_FILE,
    ComponentEntry,
    Manifest,
    directory_path,
)
from perdure.checkpoint.segments.mapped import MappedSegment, Mappings, open_segment
from perdure.checkpoint.segments.store import SegmentStore
from perdure.core.boxes import Box
from perdure.core.errors import DamagedError
from perdure.core.storage_api import Storage

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_BLOCK = 1 << 20
"""Elements handled at once, so that a tensor of many ranks never lies in memory as a whole."""


class CheckedFile:
    """A file of a checkpoint. Whatever is read of it is checked against the manifest first.

    Files with checksums of chunks are checked chunk by chunk, so that a part costs a part.

    Args:
        data: The file, mapped.
        entry: What the manifest says of it.
        where: Its path, for messages.
    """

    def __init__(self, data: Bytes, entry: FileEntry, *, where: str) -> None:
        self._data = data
        self._where = where
        self._step = max(1, entry.chunk_bytes)
        self._sums = entry.sums
        self._right: set[int] = set()
        if data.nbytes != entry.bytes:
            raise damaged(where, "checksum does not match")

    @property
    def size(self) -> int:
        return self._data.nbytes

    @property
    def where(self) -> str:
        return self._where

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop``, mapped, not to be written to.

        Raises:
            DamagedError: Some of them are wrong.
        """
        last = max(start, stop - 1) // self._step
        for chunk in range(start // self._step, min(last + 1, len(self._sums))):
            self._require_right(chunk)
        return self._data[start:stop]

    def _require_right(self, chunk: int) -> None:
        if chunk in self._right:
            return
        piece = self._data[chunk * self._step : (chunk + 1) * self._step]
        if xxhash.xxh3_128_hexdigest(piece.data) != self._sums[chunk]:
            raise damaged(self._where, "checksum does not match")
        self._right.add(chunk)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """The part ``box`` of a tensor; its bytes begin at ``start`` of a file."""

    box: Box
    file: CheckedFile
    start: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file, or in those of several ranks; read as it is asked for."""

    spec: TensorSpec
    pieces: tuple[StoredPiece, ...]

    def load(self, box: Box | None = None) -> Any:
        """The tensor, or the part ``box`` of it, in memory of its own.

        Only the pieces that the part touches are read.

        Raises:
            DamagedError: Stored bytes are wrong, or some of the part is in no piece.
        """
        wanted = Box.whole(self.spec.shape) if box is None else box
        return shaped(self._assemble(wanted), TensorSpec(self.spec.code, wanted.sizes))

    def elements(self, start: int, stop: int) -> Bytes:
        """Bytes of the elements ``start`` to ``stop`` of the flat tensor; not to be written to."""
        size = item_size(self.spec.code)
        first = self.pieces[0] if self.pieces else None
        if first is not None and first.box == Box.whole(self.spec.shape):
            return first.file.read(first.start + start * size, first.start + stop * size)
        width = math.prod(self.spec.shape[1:])
        top, bottom = start // width, -(-stop // width)
        inner = self.spec.shape[1:]
        rows = Box((top, *(0 for _ in inner)), (bottom - top, *inner))
        return self._assemble(rows)[(start - top * width) * size : (stop - top * width) * size]

    def blocks(self) -> Iterator[Bytes]:
        """All bytes of the flat tensor, some of them at a time."""
        total = math.prod(self.spec.shape)
        for start in range(0, total, _BLOCK):
            yield self.elements(start, min(start + _BLOCK, total))

    def _assemble(self, box: Box) -> Bytes:
        """The bytes of a part, copied together from all pieces that have some of it."""
        element = np.dtype(f"<u{item_size(self.spec.code)}")
        target = np.empty(box.sizes, element)
        filled = 0
        for piece in self.pieces:
            shared = piece.box.shared(box)
            if shared is None:
                continue
            target[shared.within(box)] = _view(piece, shared, element)
            filled += shared.volume
        if filled != box.volume:
            where = self.pieces[0].file.where if self.pieces else ""
            raise damaged(where, f"{box.volume - filled} elements of a tensor are in no file")
        return target.reshape(-1).view(np.uint8)


def _view(piece: StoredPiece, shared: Box, element: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A part of a piece, as it lies in the file; nothing outside its bytes is checked."""
    inside = shared.within(piece.box)
    strides = [math.prod(piece.box.sizes[axis + 1 :]) for axis in range(len(inside))]
    first = sum(cut.start * step for cut, step in zip(inside, strides, strict=True))
    last = sum((cut.stop - 1) * step for cut, step in zip(inside, strides, strict=True))
    size = element.itemsize
    data = piece.file.read(piece.start + first * size, piece.start + (last + 1) * size)
    return np.lib.stride_tricks.as_strided(
        data.view(element), shared.sizes, [step * size for step in strides], writeable=False
    )


_SharedPlaces = tuple[CheckedFile, dict[str, dict[str, tuple[int, TensorPlace]]]]
"""A file of several components: prefix → name → first byte there, and what it is."""


class CheckpointReader:
    """Contents of one checkpoint. What is read is checked against the manifest."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.manifest = manifest
        self._storage = storage
        self._root = directory_path(manifest.name.directory)
        self._shared: dict[str, _SharedPlaces] = {}

    def values(self) -> dict[str, dict[str, Any]]:
        """Small values of every component, by name."""
        files = {entry.state_file: None for entry in self.manifest.components.values()}
        found: dict[str, dict[str, Any]] = {}
        for file in files or (STATE_FILE,):
            packed = self._unpack(file)["components"]
            found |= {name: _unpack(data, self._path(file)) for name, data in packed.items()}
        return found

    def experience(self) -> dict[str, Any]:
        """What was staged as ``StagedInfo.experience``."""
        return dict(self._unpack(EXPERIENCE_FILE)["experience"])

    def tensors(self, component: str) -> dict[str, Any]:
        """Tensors of a component in memory of their own: numpy arrays, torch where numpy cannot."""
        return {name: stored.load() for name, stored in self.stored_tensors(component).items()}

    def legacy(self, component: str) -> bytes | None:
        """The pickle of a component, checked and not opened; None if it has none."""
        file = self.manifest.components[component].legacy_file
        return self._whole(file).tobytes() if file else None

    def tensor_file(self, component: str) -> Iterator[memoryview]:
        """A safetensors file with all its tensors, checked, piece by piece; none if it has none.

        It is the stored file, or what that would be if one rank had stored everything.
        """
        entry = self.manifest.components[component]
        if not entry.shards and not entry.tensor_prefix:
            return iter([self._whole(entry.tensor_file).data] if entry.tensor_file else [])
        stored = self.stored_tensors(component)
        (image,) = plan({component: {name: one.spec for name, one in stored.items()}}).images
        return _pieces_of(image, stored)

    def stored_tensors(self, component: str) -> dict[str, StoredTensor]:
        """Tensors of a component, to be read one by one, whole or in part."""
        entry = self.manifest.components[component]
        found: dict[str, StoredTensor] = {}
        if entry.tensor_file:
            file, places = self._whole_places(entry)
            for name, (start, place) in places.items():
                piece = StoredPiece(Box.whole(place.spec.shape), file, start)
                found[name] = StoredTensor(place.spec, (piece,))
        opened = functools.cache(functools.partial(self._shard_places, component))
        for name, sharded in entry.shards.items():
            pieces: list[StoredPiece] = []
            for part in sharded.parts:
                file, places = opened(part.rank)
                start, place = places.get(name, (0, None))
                wanted = TensorSpec(sharded.spec.code, part.box.sizes)
                if place is None or place.spec != wanted:
                    raise damaged(file.where, f"tensor {name} is not the part {wanted.shape} there")
                pieces.append(StoredPiece(part.box, file, start))
            found[name] = StoredTensor(sharded.spec, tuple(pieces))
        return found

    def digest(self, component: str) -> str:
        """xxh3-128 over sorted names, types, shapes and elements: whatever ranks stored it.

        That of a module's parameters is :func:`perdure.models.digest_weights` of them.
        """
        state = xxhash.xxh3_128()
        for name, stored in sorted(self.stored_tensors(component).items()):
            code, shape = stored.spec.code, stored.spec.shape
            element = NUMPY_BY_CODE.get(code) or np.dtype(f"<u{item_size(code)}")
            state.update(f"{name}|{element.str}|{shape}|".encode())
            for block in stored.blocks():
                state.update(block.data)
        return state.hexdigest()

    def segments(self, component: str, store: SegmentStore | None = None) -> list[MappedSegment]:
        """Segments of a component, opened; their rows are checked before they are first used.

        Args:
            component: Its name.
            store: Opens them; without one, a segment that is found damaged stays in its place.
        """
        stored = self.manifest.segments.get(component, ())
        if store is not None:
            return store.open(component, stored)
        mappings = Mappings(self._storage)
        return [open_segment(one, component=component, mappings=mappings) for one in stored]

    def _whole_places(
        self, entry: ComponentEntry
    ) -> tuple[CheckedFile, dict[str, tuple[int, TensorPlace]]]:
        """The file with a component's whole tensors; name → first byte there, and what it is."""
        if entry.tensor_prefix:
            # No functools.cache of a method: the cycle would keep what is mapped from going.
            if entry.tensor_file not in self._shared:
                self._shared[entry.tensor_file] = self._read_shared(entry.tensor_file)
            file, components = self._shared[entry.tensor_file]
            if entry.tensor_prefix not in components:
                raise damaged(file.where, f"no tensor's name begins with {entry.tensor_prefix}")
            return file, components[entry.tensor_prefix]
        file = self._open(entry.tensor_file)
        return file, {place.name: (start, place) for start, place in self._places(file)}

    def _read_shared(self, tensor_file: str) -> _SharedPlaces:
        """A file of several components: prefix → name → first byte, and what it is."""
        file = self._open(tensor_file)
        components: dict[str, dict[str, tuple[int, TensorPlace]]] = {}
        for start, place in self._places(file):
            component, colon, name = place.name.partition(":")
            components.setdefault(component + colon, {})[name] = (start, place)
        return file, components

    def _shard_places(
        self, component: str, rank: int
    ) -> tuple[CheckedFile, dict[str, tuple[int, TensorPlace]]]:
        file = self._open(self.manifest.shard_file(component, rank))
        return file, {place.name: (start, place) for start, place in self._places(file)}

    def _places(self, file: CheckedFile) -> Iterator[tuple[int, TensorPlace]]:
        """The first byte of every tensor in a file, and what it is."""
        length = int.from_bytes(file.read(0, min(8, file.size)).tobytes(), "little")
        header = file.read(0, min(8 + length, file.size)).tobytes()
        try:
            start, places = parse_header(header, file_size=file.size)
        except ValueError as error:
            raise damaged(file.where, f"not a tensor file ({error})") from error
        return ((start + place.start, place) for place in places)

    def _unpack(self, file: str) -> dict[str, Any]:
        return _unpack(self._whole(file).tobytes(), self._path(file))

    def _whole(self, file: str) -> Bytes:
        opened = self._open(file)
        return opened.read(0, opened.size)

    def _open(self, file: str) -> CheckedFile:
        entry = self.manifest.files.get(file)
        if entry is None:
            raise damaged(self._path(file), "not listed in the manifest")
        try:
            data = self._storage.map(self._path(file))
        except FileNotFoundError as error:
            raise damaged(self._path(file), "missing") from error
        return CheckedFile(data, entry, where=self._path(file))

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"


def damaged(where: str, reason: str) -> DamagedError:
    """The error of a file that is not what was committed."""
    return DamagedError(
        reason,
        where=where,
        rule="what is loaded is what was committed, byte by byte",
        way_out="use an earlier checkpoint, as a resume does: `perdure ckpt verify` says which are"
        " whole",
    )


def _pieces_of(image: FileImage, stored: Mapping[str, StoredTensor]) -> Iterator[memoryview]:
    tensors: Sequence[Iterator[Bytes]] = [stored[place.name].blocks() for place in image.places]
    yield memoryview(image.header)
    for block in itertools.chain.from_iterable(tensors):
        yield block.data


def _unpack(data: bytes, where: str) -> dict[str, Any]:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise damaged(where, f"not msgpack ({error})") from error
