"""A model's weights in one file, for engines that do not share memory with the learner.

A file: the length of the header (8 bytes, little-endian), the header (msgpack: name, dtype, shape,
offset of each tensor), and the tensors, each at a multiple of 64 bytes from the start. It is read
by the program that wrote it or by one of the same version, and never kept.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash
from torch import Tensor

from perdure.core.errors import DamagedError
from perdure.core.rollout_api import WeightFile
from perdure.core.storage_api import Storage
from perdure.models.digest import as_array

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16)}


def write_weights(storage: Storage, name: str, weights: Mapping[str, Any]) -> str:
    """Lay the weights (tensors or numpy arrays) out in a new file and return its checksum.

    Nobody finds the file under its name before it is whole. It is not synced: it need not survive.

    Raises:
        StorageError: No space, or the storage fails.
        ValueError: A dtype that engines do not load.
    """
    tensors = {key: torch.as_tensor(weights[key]) for key in weights}
    state = xxhash.xxh3_128()
    unfinished = f"{name}.part"
    storage.remove(unfinished)
    file = storage.create_append(unfinished)
    try:
        for piece in _pieces(tensors):
            state.update(piece)
            file.append([piece])
    finally:
        file.close()
    storage.rename(unfinished, name)
    return state.hexdigest()


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    offset = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"weight {name} is {dtype}; engines load {', '.join(_DTYPES)}")
        entries.append((name, dtype, tuple(tensor.shape), offset))
        offset += _aligned(tensor.numel() * tensor.element_size())
    header: bytes = msgpack.packb(entries)
    yield len(header).to_bytes(_LENGTH_BYTES, "little") + header
    yield bytes(_aligned(_LENGTH_BYTES + len(header)) - _LENGTH_BYTES - len(header))
    for tensor in tensors.values():
        data = as_array(tensor).reshape(-1).view(np.uint8).data
        yield data
        yield bytes(_aligned(len(data)) - len(data))


def read_weights(file: WeightFile) -> dict[str, Tensor]:
    """The weights, as views of the mapped file, after its checksum was found to hold.

    Raises:
        DamagedError: The file is absent, or holds other bytes than were written.
    """
    try:
        with open(file.path, "rb") as opened:
            # A private copy-on-write mapping: torch wants memory that may be written.
            view = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        raise _damaged(file, f"the weights cannot be read ({error})") from error
    found = xxhash.xxh3_128_hexdigest(view)
    if found != file.checksum:
        raise _damaged(file, f"the weights have checksum {found} instead of {file.checksum}")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    start = _aligned(_LENGTH_BYTES + length)
    entries = msgpack.unpackb(view[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return {
        name: _tensor(view, dtype, shape, start + offset) for name, dtype, shape, offset in entries
    }


def _tensor(view: memoryview, dtype: str, shape: list[int], offset: int) -> Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(view, dtype=_DTYPES[dtype], count=count, offset=offset).reshape(shape)


def _damaged(file: WeightFile, what: str) -> DamagedError:
    return DamagedError(
        what,
        where=file.path,
        rule="an engine loads only the bytes that were written for it",
        way_out="publish again",
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
