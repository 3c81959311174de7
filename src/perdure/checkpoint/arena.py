"""Preallocated host memory that holds a checkpoint's file images while they are written."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import numpy as np

from perdure.checkpoint.arena_memory import ArenaMemory
from perdure.checkpoint.copying import LARGE_BYTES, ImageCopy, copy_images
from perdure.checkpoint.dtypes import NUMPY_BY_CODE, code_of
from perdure.checkpoint.layout import ArenaLayout, FileImage, TensorSpec
from perdure.storage.bulk_process import SharedMemory

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, Any]


class Arena:
    """One page-aligned buffer, laid out as the files are. It grows when a layout needs more.

    Args:
        share_from: From this size on, its memory can be mapped by the writer process; None = never.
    """

    def __init__(self, *, share_from: int | None = None) -> None:
        self._share_from = share_from
        self._memory: ArenaMemory | None = None
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._layout: ArenaLayout | None = None
        self._arrays: dict[str, dict[str, Array]] = {}
        self._specs: dict[str, dict[str, TensorSpec]] = {}
        self._tensors: dict[str, dict[str, Any]] = {}
        self._pinned = False

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def shared(self) -> SharedMemory | None:
        """How another process maps it, if it can."""
        return None if self._memory is None else self._memory.shared

    def fit(self, size: int) -> None:
        """Have at least ``size`` bytes, all touched, so that no copy waits for a page."""
        if self._buffer.nbytes >= size:
            return
        self.close()
        shared = self._share_from is not None and size >= self._share_from
        self._memory = ArenaMemory(size, shared=shared)
        self._buffer = self._memory.array

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned:
            torch_arena().unpin(self._buffer)
            self._pinned = False
        self._forget_places()
        self._buffer = np.empty(0, np.uint8)
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def fill(
        self, layout: ArenaLayout, tensors_by_path: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, tuple[str, ...]]:
        """Copy headers and tensors to their places; afterwards nothing here aliases a tensor.

        Returns:
            File → xxh3-128 of its chunks, in hex. None of files with tensors of a GPU: what it has
            written lies in no core's cache, and hashing it would keep the training waiting.
        """
        self.fit(layout.size)
        if layout is not self._layout:
            self._lay_out(layout)
        copies: dict[str, ImageCopy] = {}
        for image in layout.images:
            tensors = tensors_by_path[image.path]
            if _on_gpu(tensors):
                self._copy(image.path, tensors)
                continue
            plain = {
                name: data for name, one in tensors.items() if (data := _plain(one)) is not None
            }
            self._copy(image.path, {n: t for n, t in tensors.items() if n not in plain})
            copies[image.path] = self._image_copy(image, plain)
        return copy_images(copies)

    def file_bytes(self, image: FileImage) -> memoryview:
        """The finished file, as a view of the arena."""
        return self._buffer[image.arena_offset : image.arena_offset + image.size].data

    def file_blocks(self, image: FileImage) -> memoryview:
        """The finished file and whatever lies behind it up to the next whole block."""
        return self._buffer[image.arena_offset : image.arena_offset + image.blocks_size].data

    def _lay_out(self, layout: ArenaLayout) -> None:
        """Write the headers and remember where every tensor goes: once for many saves."""
        self._forget_places()
        for image in layout.images:
            start = image.arena_offset
            self._buffer[start : start + len(image.header)] = np.frombuffer(image.header, np.uint8)
            arrays = self._arrays.setdefault(image.path, {})
            for place in image.places:
                data = self._buffer[image.data_offset + place.start : image.data_offset + place.end]
                dtype = NUMPY_BY_CODE.get(place.spec.code)
                # Types that numpy lacks come as torch tensors only.
                shaped = data if dtype is None else data.view(dtype).reshape(place.spec.shape)
                arrays[place.name] = shaped
            self._specs[image.path] = {place.name: place.spec for place in image.places}
        self._layout = layout

    def _image_copy(self, image: FileImage, plain: Mapping[str, Bytes]) -> ImageCopy:
        parts = [
            (len(image.header) + place.start, plain[place.name])
            for place in image.places
            if place.name in plain
        ]
        return ImageCopy(self._buffer[image.arena_offset :][: image.size], parts)

    def _copy(self, path: str, tensors: Mapping[str, Any]) -> None:
        if all(map(_is_array, tensors.values())):
            self._copy_arrays(path, tensors)
        else:
            self._copy_mixed(path, tensors)

    def _copy_arrays(self, path: str, arrays: Mapping[str, Array]) -> None:
        places = self._arrays[path]
        for name, array in arrays.items():
            np.copyto(places[name], array, casting="equiv")

    def _copy_mixed(self, path: str, tensors: Mapping[str, Any]) -> None:
        arrays = {name: tensor for name, tensor in tensors.items() if _is_array(tensor)}
        self._copy_arrays(path, arrays)
        names = [name for name in tensors if name not in arrays] if arrays else list(tensors)
        torch_half = torch_arena()
        places = self._tensors.setdefault(path, {})
        if not places.keys() >= set(names):
            places |= {name: torch_half.view(*self._bytes_of(path, name)) for name in names}
        sources = [tensors[name] for name in names]
        if not self._pinned and torch_half.on_gpu(sources):
            torch_half.pin(self._buffer)
            self._pinned = True
        torch_half.copy_all([places[name] for name in names], sources)

    def _bytes_of(self, path: str, name: str) -> tuple[Bytes, TensorSpec]:
        return self._arrays[path][name].reshape(-1).view(np.uint8), self._specs[path][name]

    def _forget_places(self) -> None:
        self._layout = None
        self._arrays.clear()
        self._specs.clear()
        self._tensors.clear()


def _is_array(tensor: Any) -> bool:
    return isinstance(tensor, np.ndarray)


def _on_gpu(tensors: Mapping[str, Any]) -> bool:
    others = [tensor for tensor in tensors.values() if not _is_array(tensor)]
    return bool(others) and torch_arena().on_gpu(others)


def _plain(tensor: Any) -> Bytes | None:
    """The bytes of a large tensor as they are stored, if they lie in host memory in one piece."""
    if not isinstance(tensor, np.ndarray):
        return torch_arena().plain_bytes(tensor)
    # A matrix or a masked array has a way of its own to be cut.
    array = np.asarray(cast("Array", tensor))
    if array.nbytes < LARGE_BYTES or not array.flags.c_contiguous or not array.dtype.isnative:
        return None
    return array.reshape(-1).view(np.uint8)


def spec_of(tensor: Any) -> TensorSpec:
    """Describe a numpy array or a torch tensor.

    Raises:
        ValueError: Its type cannot be stored.
    """
    if not isinstance(tensor, np.ndarray):
        return torch_arena().spec_of(tensor)
    array = cast("Array", tensor)
    code = code_of(array.dtype)
    if code is None:
        raise ValueError(f"elements of type {array.dtype} cannot be stored")
    return TensorSpec(code, tuple(array.shape))


def materialize(data: Bytes, spec: TensorSpec) -> Any:
    """A tensor in memory of its own from stored bytes: numpy where it can, torch otherwise."""
    return shaped(np.array(data, copy=True), spec)


def shaped(data: Bytes, spec: TensorSpec) -> Any:
    """A tensor over bytes in memory, which it shares: numpy where it can, torch otherwise."""
    if spec.code in NUMPY_BY_CODE:
        return data.view(NUMPY_BY_CODE[spec.code]).reshape(spec.shape)
    return torch_arena().view(data, spec)


@functools.cache
def torch_arena() -> ModuleType:
    """The torch half of this module, imported only when a torch tensor is at hand."""
    return importlib.import_module("perdure.checkpoint.torch_arena")
