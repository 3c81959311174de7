"""Element types of stored tensors: the safetensors codes, their sizes and their numpy twins."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

NUMPY_BY_CODE = MappingProxyType(
    {
        "BOOL": np.dtype("|b1"),
        "U8": np.dtype("|u1"),
        "I8": np.dtype("|i1"),
        "U16": np.dtype("<u2"),
        "I16": np.dtype("<i2"),
        "F16": np.dtype("<f2"),
        "U32": np.dtype("<u4"),
        "I32": np.dtype("<i4"),
        "F32": np.dtype("<f4"),
        "U64": np.dtype("<u8"),
        "I64": np.dtype("<i8"),
        "F64": np.dtype("<f8"),
        "C64": np.dtype("<c8"),
    }
)
"""Codes that numpy can represent."""

TORCH_ONLY_SIZES = MappingProxyType({"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1})
"""Codes without a numpy type → bytes per element; they are read as torch tensors."""

_CODE_BY_NUMPY = {dtype: code for code, dtype in NUMPY_BY_CODE.items()}


def item_size(code: str) -> int:
    """Bytes per element of a code. Raises ``KeyError`` for an unknown one."""
    if code in TORCH_ONLY_SIZES:
        return TORCH_ONLY_SIZES[code]
    return NUMPY_BY_CODE[code].itemsize


def code_of(dtype: np.dtype[Any]) -> str | None:
    """The code of a numpy type, whatever its byte order, or None if files cannot hold it."""
    return _CODE_BY_NUMPY.get(dtype.newbyteorder("<"))
