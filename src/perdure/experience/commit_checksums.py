"""Checksums for a thread that must not let go of the interpreter in between.

``xxhash`` (from version 4 on; before, always) lets go of it for more than 64 KiB. That pays where
several threads make checksums. The thread that commits would have to wait until a caller that
computes in the interpreter gives it back: up to the switch interval, 5 ms, hundreds of times what
the checksum of a record takes.
"""

from __future__ import annotations

import xxhash

_HELD_BYTES = 2**15


def checksum_held(data: bytes | bytearray | memoryview) -> int:
    """The xxh3-64 of some bytes."""
    if len(data) <= _HELD_BYTES:
        return xxhash.xxh3_64_intdigest(data)
    state = xxhash.xxh3_64()
    update_held(state, data)
    return state.intdigest()


def update_held(state: xxhash.xxh3_64, data: bytes | bytearray | memoryview) -> None:
    """``state.update(data)``."""
    view = memoryview(data)
    for start in range(0, len(view), _HELD_BYTES):
        state.update(view[start : start + _HELD_BYTES])
