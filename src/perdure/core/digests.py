"""Digests of logical tensors (whatever the sharding or device) and of small structured values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgpack
import numpy as np
import xxhash


def digest_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """xxh3-128 hex digest over sorted names, dtypes, shapes and little-endian bytes."""
    state = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


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
