"""Counter-based random numbers keyed by what they are for.

No choice is drawn from a global stream, so neither timing nor a crash changes it: the same
``(seed, purpose, numbers)`` gives the same stream in any process. Philox-4x64 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3") keyed by an xxh3-128 digest of the key.
"""

from __future__ import annotations

import numpy as np
import xxhash


def key_of(seed: int, purpose: str, *numbers: int) -> int:
    """128-bit key of a purpose. Distinct argument tuples give distinct texts, hence keys."""
    text = f"{seed}|{purpose}|" + ",".join(str(int(number)) for number in numbers)
    return xxhash.xxh3_128_intdigest(text.encode())


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A numpy generator for one purpose, e.g. ``generator(seed, "shuffle", step, epoch)``."""
    return np.random.Generator(np.random.Philox(key=key_of(seed, purpose, *numbers)))


def seed_63(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit integer for libraries that want a plain seed."""
    return key_of(seed, purpose, *numbers) >> 65
