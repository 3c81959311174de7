"""Perdure: reinforcement learning that loses nothing to a crash, and proves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.standalone import CheckpointEngine, every, keep

__version__ = "0.1.0"
__all__ = ["CheckpointEngine", "__version__", "every", "keep"]


def __getattr__(name: str) -> object:
    """What scripts import from here, loaded when it is asked for."""
    if name in ("CheckpointEngine", "every", "keep"):
        return getattr(importlib.import_module("perdure.standalone"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
