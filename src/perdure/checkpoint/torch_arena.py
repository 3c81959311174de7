"""The torch half of the arena: describing torch tensors and copying them to and from bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch

from perdure.checkpoint.copying import LARGE_BYTES
from perdure.checkpoint.layout import TensorSpec

DTYPE_BY_CODE = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODE_BY_DTYPE = {dtype: code for code, dtype in DTYPE_BY_CODE.items()}


def spec_of(tensor: object) -> TensorSpec:
    """Describe a dense torch tensor. Raises ``ValueError`` for anything else."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"a {type(tensor).__name__} is neither a numpy array nor a torch tensor")
    code = _CODE_BY_DTYPE.get(tensor.dtype)
    if code is None or tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot be stored")
    if tensor.is_meta:
        raise ValueError("a tensor on the device meta has no elements that could be stored")
    return TensorSpec(code, tuple(tensor.shape))


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor was changed in place, as torch counts; 0 where it does not."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of them lies on a GPU."""
    return any(tensor.is_cuda for tensor in tensors)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors from any device to their places on the host; they are there on return.

    On a GPU they go over a stream of their own; the places should be pinned.
    """
    with torch.no_grad():
        if not on_gpu(sources):
            if targets:
                torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            return
        stream = _side_stream()
        # What the training stream was given comes first; what it is given later waits for nothing.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        stream.synchronize()


def plain_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """The bytes of a large tensor as they are stored, if they lie in host memory in one piece."""
    if (
        tensor.nbytes < LARGE_BYTES
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
    ):
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def pin(buffer: np.ndarray[Any, Any]) -> None:
    """Lock the pages of a buffer, so that a GPU copies to them by itself. Undo with :func:`unpin`.

    Raises:
        RuntimeError: The driver refused.
    """
    torch.cuda.check_error(_runtime().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0))


def unpin(buffer: np.ndarray[Any, Any]) -> None:
    """Undo :func:`pin`, before the memory goes."""
    torch.cuda.check_error(_runtime().cudaHostUnregister(buffer.ctypes.data))


def _runtime() -> Any:
    return cast("Any", torch.cuda.cudart())


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def view(data: np.ndarray[Any, Any], spec: TensorSpec) -> torch.Tensor:
    """A tensor that shares the memory of ``data``."""
    if not data.nbytes:
        return torch.empty(spec.shape, dtype=DTYPE_BY_CODE[spec.code])
    return torch.as_tensor(data).view(DTYPE_BY_CODE[spec.code]).reshape(spec.shape)
