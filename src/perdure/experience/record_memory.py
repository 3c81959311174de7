"""Memory for the payload records of one commit, used again for those of the next.

What a process gets afresh from its kernel is mapped page by page as it is first touched, which
takes longer than to copy the trajectories.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from perdure.core.trajectories import Array
from perdure.experience.format import Record, contiguous, joined, record_length

_LARGEST_BYTES = 2**19
_LARGEST_COUNT = 64


class RecordMemory:
    """Joins the pieces of records. Belongs to one thread.

    At most 64 blocks of 512 KiB are kept; a larger record, or one more, has memory of its own.
    """

    def __init__(self) -> None:
        self._free: list[io.BytesIO] = []
        self._lent: list[tuple[io.BytesIO, memoryview]] = []

    def joined(self, pieces: Sequence[bytes | Array]) -> Record:
        """The bytes of the pieces of one record; valid until :meth:`take_back`."""
        size = record_length(pieces)
        if size > _LARGEST_BYTES or len(self._lent) == _LARGEST_COUNT:
            return joined(pieces)
        block = self._free.pop() if self._free else io.BytesIO()
        # The types of numpy do not tell that arrays are buffers.
        buffers: Any = pieces
        try:
            block.writelines(buffers)
        except ValueError:
            block.seek(0)
            buffers = contiguous(pieces)
            block.writelines(buffers)
        assert block.tell() == size
        record = block.getbuffer()[:size]
        self._lent.append((block, record))
        return record

    def take_back(self) -> None:
        """Nobody uses the records any more."""
        for block, record in self._lent:
            # To write into one that somebody looks at all the same raises BufferError.
            record.release()
            block.seek(0)
            self._free.append(block)
        self._lent.clear()
