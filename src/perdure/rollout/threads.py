"""How much of a machine an engine takes."""

from __future__ import annotations

import torch


def compute_with(threads: int) -> None:
    """Let tensors of this process be computed by so many threads; part of the arithmetic."""
    torch.set_num_threads(threads)
