"""Preallocated host memory that holds a checkpoint's file images while they are written."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

import numpy as np

from perdure.checkpoint.dtypes import NUMPY_BY_CODE, code_of
from perdure.checkpoint.layout import ALIGNMENT, ArenaLayout, FileImage, TensorSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Arena:
    """One page-aligned buffer, laid out as the files are. It grows when a layout needs more."""

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def fit(self, size: int) -> None:
        """Have at least ``size`` bytes, all touched, so that no copy waits for a page."""
        if self._buffer.nbytes >= size:
            return
        self._buffer = np.empty(0, np.uint8)
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._buffer = raw[start : start + size]
        self._buffer.fill(0)

    def fill(self, layout: ArenaLayout, tensors_by_path: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy headers and tensors to their places; afterwards nothing here aliases a tensor."""
        self.fit(layout.size)
        for image in layout.images:
            start = image.arena_offset
            self._buffer[start : start + len(image.header)] = np.frombuffer(image.header, np.uint8)
            tensors = tensors_by_path[image.path]
            for place in image.places:
                data = self._buffer[image.data_offset + place.start : image.data_offset + place.end]
                copy_into(data, tensors[place.name], place.spec)

    def file_bytes(self, image: FileImage) -> memoryview:
        """The finished file, as a view of the arena."""
        return self._buffer[image.arena_offset : image.arena_offset + image.size].data


def spec_of(tensor: Any) -> TensorSpec:
    """Describe a numpy array or a torch tensor.

    Raises:
        ValueError: Its type cannot be stored.
    """
    if not isinstance(tensor, np.ndarray):
        return torch_arena().spec_of(tensor)
    array = cast("np.ndarray[Any, Any]", tensor)
    code = code_of(array.dtype)
    if code is None:
        raise ValueError(f"elements of type {array.dtype} cannot be stored")
    return TensorSpec(code, tuple(array.shape))


def copy_into(data: Bytes, tensor: Any, spec: TensorSpec) -> None:
    """Copy a tensor, contiguous and little-endian, into ``data`` (exactly its bytes)."""
    if not isinstance(tensor, np.ndarray):
        torch_arena().copy_into(data, tensor, spec)
        return
    array = cast("np.ndarray[Any, Any]", tensor)
    target = data.view(NUMPY_BY_CODE[spec.code]).reshape(spec.shape)
    np.copyto(target, array, casting="equiv")


def materialize(data: Bytes, spec: TensorSpec) -> Any:
    """A tensor in memory of its own from stored bytes: numpy where it can, torch otherwise."""
    owned = np.array(data, copy=True)
    if spec.code in NUMPY_BY_CODE:
        return owned.view(NUMPY_BY_CODE[spec.code]).reshape(spec.shape)
    return torch_arena().view(owned, spec)


@functools.cache
def torch_arena() -> ModuleType:
    """The torch half of this module, imported only when a torch tensor is at hand."""
    return importlib.import_module("perdure.checkpoint.torch_arena")
