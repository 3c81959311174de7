"""The torch half of the arena: describing torch tensors and copying them to and from bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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
    return TensorSpec(code, tuple(tensor.shape))


def copy_into(data: np.ndarray[Any, Any], tensor: torch.Tensor, spec: TensorSpec) -> None:
    """Copy a tensor from any device into ``data`` (exactly its bytes); returns when it is there."""
    if tensor.numel():
        view(data, spec).copy_(tensor.detach())


def view(data: np.ndarray[Any, Any], spec: TensorSpec) -> torch.Tensor:
    """A tensor that shares the memory of ``data``."""
    if not data.nbytes:
        return torch.empty(spec.shape, dtype=DTYPE_BY_CODE[spec.code])
    return torch.as_tensor(data).view(DTYPE_BY_CODE[spec.code]).reshape(spec.shape)
