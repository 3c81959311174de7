"""The torch settings under which equal inputs give equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_math(enabled: bool) -> Iterator[None]:
    """Deterministic kernels and one thread inside the block; the settings before, after it.

    One thread and two give different sums, so the number is part of the arithmetic.
    """
    if not enabled:
        yield
        return
    mode, threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    torch.set_deterministic_debug_mode("error")
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
