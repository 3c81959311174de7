"""Matrix products of a pass by the faster of two libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MIN_MACS = 1_300_000
"""Multiply-adds from which oneDNN beats the BLAS behind ``torch.mm``; below, a call costs more.

Measured on AMD. MKL on a CPU of Intel beats it at every size: a step took 12 to 23 % less there.
"""
PACKED_FOR_ROWS = 16
"""Rows for which oneDNN chooses its layout of the weights; it serves any number."""


class Product:
    """``x @ weight.T + bias``, float32 on the CPU.

    On one machine the library follows from shapes alone, so equal shapes always round alike. oneDNN
    gets a copy of the weights in its own layout, made by the first product that wants it.

    Args:
        weight: (K, D), aliased; :meth:`renew` must follow every change of it.
        bias: (K,) or None, aliased.
        placeless: A row's bits must not depend on its place among the rows. MKL breaks this for
            some widths (seen with odd D or few K), oneDNN keeps it.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, placeless: bool = False
    ) -> None:
        self.weight, self.bias = weight, bias
        self._weight_DK = weight.T
        self._min_rows = 0 if placeless else -(-MIN_MACS // weight.numel())
        self._onednn = _onednn() if placeless or not mkl_runs_on_intel() else None
        self._packed: Tensor | None = None

    @property
    def copies(self) -> list[Tensor]:
        """What is held beside the weights."""
        return [] if self._packed is None else [self._packed]

    def renew(self) -> None:
        """Forget what was made of the weights."""
        self._packed = None

    def __call__(self, x_ND: Tensor, out_NK: Tensor) -> Tensor:
        """The product, in ``out_NK`` or in a tensor of its own, whichever is cheaper."""
        if self._onednn is not None and x_ND.shape[0] >= self._min_rows:
            return self._onednn(x_ND, self._layout(), self.bias, "none", [], "")
        if self.bias is not None:
            return torch.addmm(self.bias, x_ND, self._weight_DK, out=out_NK)
        return torch.mm(x_ND, self._weight_DK, out=out_NK)

    def add_to(self, target_NK: Tensor, x_ND: Tensor) -> None:
        """``target += x @ weight.T``; for products without bias."""
        if self._onednn is not None and x_ND.shape[0] >= self._min_rows:
            target_NK.add_(self._onednn(x_ND, self._layout(), None, "none", [], ""))
        else:
            target_NK.addmm_(x_ND, self._weight_DK)

    def _layout(self) -> Tensor:
        packed = self._packed
        if packed is None:
            reorder: Callable[..., Any] = torch.ops.mkldnn._reorder_linear_weight
            packed = self._packed = reorder(self.weight, PACKED_FOR_ROWS)
        return packed


def mkl_runs_on_intel() -> bool:
    """Whether ``torch.mm`` is MKL's, on a CPU that it is made for; False if torch cannot tell."""
    capabilities: Callable[[], Mapping[str, Any]] | None
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None or not torch.backends.mkl.is_available():
        return False
    return "Intel" in str(capabilities().get("cpu_name", ""))


def _onednn() -> Callable[..., Any] | None:
    """``linear`` of oneDNN on plain tensors, or None where torch was built without it.

    ``torch.nn.functional.linear`` takes oneDNN for reduced precision only; this operator is the one
    that torch's own compiler emits.
    """
    library = torch.ops.mkldnn
    wanted = ("_linear_pointwise", "_reorder_linear_weight")
    if torch.backends.mkldnn.is_available() and all(hasattr(library, name) for name in wanted):
        return library._linear_pointwise
    return None
