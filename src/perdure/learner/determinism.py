"""The torch settings under which equal inputs give equal bits on an equal number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_math(enabled: bool) -> Iterator[None]:
    """Deterministic kernels inside the block, or an error where there is none; then as before.

    The number of threads is part of the arithmetic too; it belongs to the process, not to a block.
    """
    before = torch.get_deterministic_debug_mode()
    # Unlike use_deterministic_algorithms, this does not import the compiler (seconds).
    torch.set_deterministic_debug_mode("error" if enabled else before)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
