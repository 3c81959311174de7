"""Memory for the payload records of one commit, used again for those of a later one.

What a process gets afresh from its kernel is mapped page by page as it is first touched, which
takes longer than to copy the trajectories.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from typing import Any

from perdure.core.trajectories import Array
from perdure.experience.format import Record, contiguous, joined, record_length

_LARGEST_BYTES = 2**20 + 2**18
_BLOCKS = 256


class MemoryBlocks:
    """256 blocks of up to 1.25 MiB, lent to commits. Thread-safe."""

    def __init__(self) -> None:
        # Blocks that have been used lie at the right end: those are lent first.
        self._free = deque([io.BytesIO() for _ in range(_BLOCKS)])

    def lend(self) -> io.BytesIO | None:
        """A block, to be written from its start; None: all are lent."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def take_back(self, block: io.BytesIO) -> None:
        """Nobody uses the block any more."""
        block.seek(0)
        self._free.append(block)


class RecordMemory:
    """Joins the pieces of the records of one commit. Belongs to one thread at a time.

    A record above 1.25 MiB, or one for which no block is left, has memory of its own.
    """

    def __init__(self, blocks: MemoryBlocks) -> None:
        self._blocks = blocks
        self._lent: list[tuple[io.BytesIO, memoryview, memoryview]] = []

    def joined(self, pieces: Sequence[bytes | Array]) -> Record:
        """The bytes of the pieces of one record; valid until :meth:`take_back`."""
        size = record_length(pieces)
        block = self._blocks.lend() if size <= _LARGEST_BYTES else None
        if block is None:
            return joined(pieces)
        # The types of numpy do not tell that arrays are buffers.
        buffers: Any = pieces
        try:
            try:
                block.writelines(buffers)
            except ValueError:
                block.seek(0)
                buffers = contiguous(pieces)
                block.writelines(buffers)
        except BaseException:
            self._blocks.take_back(block)
            raise
        assert block.tell() == size
        whole = block.getbuffer()
        record = whole[:size]
        self._lent.append((block, whole, record))
        return record

    def take_back(self) -> None:
        """Nobody uses the records any more."""
        for block, whole, record in self._lent:
            # To write into one that somebody looks at all the same raises BufferError. Who has got
            # hold of the views, as a memory profiler does, looks at nothing any more.
            record.release()
            whole.release()
            self._blocks.take_back(block)
        self._lent.clear()
