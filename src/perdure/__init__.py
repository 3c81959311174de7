"""Perdure: reinforcement learning that loses nothing to a crash, and proves it."""

__version__ = "0.1.0"
