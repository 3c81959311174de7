"""Checksums of the chunks of a file."""

from __future__ import annotations

import xxhash


class ChunkSums:
    """xxh3-128 of each ``chunk_bytes`` of what passes by; the last chunk may be shorter."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = max(1, chunk_bytes)
        self._ended: list[str] = []
        self._open = xxhash.xxh3_128()
        self._left = self._chunk_bytes

    @property
    def bytes(self) -> int:
        """How much has passed by."""
        return (len(self._ended) + 1) * self._chunk_bytes - self._left

    def update(self, data: memoryview | bytes) -> None:
        """The next bytes."""
        rest = memoryview(data)
        while rest.nbytes > self._left:
            self._open.update(rest[: self._left])
            rest = rest[self._left :]
            self._ended.append(self._open.hexdigest())
            self._open, self._left = xxhash.xxh3_128(), self._chunk_bytes
        self._open.update(rest)
        self._left -= rest.nbytes

    def hexdigests(self) -> tuple[str, ...]:
        """Those of all chunks so far, in hex; of nothing there is one."""
        return (*self._ended, self._open.hexdigest())
