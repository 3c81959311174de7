"""Process-wide arithmetic settings of a run and a description of the machine it runs on."""

from __future__ import annotations

import platform
import random
from importlib import metadata

import numpy as np
import torch

from perdure import __version__
from perdure.core.keyed_random import seed_63
from perdure.trainers.config import RunConfig


def fix_arithmetic(config: RunConfig) -> None:
    """Set thread count, torch's deterministic algorithms if asked for, and the global generators.

    Perdure draws nothing from the global generators; user code (a reward function) may.
    """
    torch.set_num_threads(config.threads)
    # Sets the same switch as use_deterministic_algorithms, which imports the compiler (seconds).
    torch.set_deterministic_debug_mode("error" if config.deterministic else "default")
    seed = seed_63(config.seed, "global generators")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


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
