"""Which side of the training / held-out split a prompt lies on, decided by its text alone.

Because nothing but the text decides, a prompt is on one side in every stream, epoch, run and seed.
"""

from __future__ import annotations

import xxhash

HELD_OUT_FRACTION = 1 / 8
"""Share of the prompts of a generated task that is never trained."""


def is_held_out(text: str, *, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether the prompt ``text`` is kept for evaluation; about ``fraction`` of all texts are."""
    return xxhash.xxh3_64_intdigest(b"perdure/held-out|" + text.encode()) < fraction * 2**64
