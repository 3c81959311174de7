"""Process-wide arithmetic settings of a run and a description of the machine it runs on."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from perdure import __version__
from perdure.trainers.config import RunConfig


def fix_arithmetic(config: RunConfig) -> None:
    """Set thread count and, in deterministic mode, torch's deterministic algorithms."""
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(config.deterministic)


def machine_description() -> dict[str, str]:
    """Versions and CPU kind: what bit-identity depends on besides the configuration."""
    libraries = {name: metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    return {
        "perdure": __version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        **libraries,
    }
