"""Digests of logical tensors (whatever the sharding or device) and of small structured values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgpack
import numpy as np
import xxhash


class ArraysDigest:
    """The digest that :func:`digest_arrays` gives, made an array at a time."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._last = ""

    def add(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Add an array; its name comes behind the last one's."""
        assert self._last <= name, f"{name} comes before {self._last}"
        self._last = name
        array = np.ascontiguousarray(array)
        self._state.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        self._state.update(array.reshape(-1).view(np.uint8).data)

    def hex(self) -> str:
        """xxh3-128 hex digest of the arrays so far."""
        return self._state.hexdigest()


def digest_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """xxh3-128 hex digest over sorted names, dtypes, shapes and little-endian bytes."""
    digest = ArraysDigest()
    for name in sorted(arrays):
        digest.add(name, arrays[name])
    return digest.hex()


def digest_values(value: object) -> str:
    """xxh3-128 hex digest of a msgpack-able value; mapping keys are sorted."""
    return xxhash.xxh3_128_hexdigest(msgpack.packb(_sorted(value)))


def _sorted(value: object) -> object:
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        return {str(key): _sorted(mapping[key]) for key in sorted(mapping, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in cast("Sequence[object]", value)]
    return value
