"""The digest of a model's weights, shared by learner and engines: equal digest, equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perdure.core.digests import digest_arrays


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Name → detached parameter, aliasing the model (tied weights appear once)."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copied_weights(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors or numpy arrays as tensors on the CPU that nobody else changes."""
    return {name: torch.as_tensor(value).detach().cpu().clone() for name, value in weights.items()}


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor as numpy, without copying on CPU; bfloat16 as its raw 16-bit patterns."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def digest_weights(weights: Mapping[str, Tensor]) -> str:
    """xxh3-128 hex digest over names, dtypes, shapes and bytes."""
    return digest_arrays({name: as_array(tensor) for name, tensor in weights.items()})
