"""Copying large tensors to their places in file images, and the checksums of the images' chunks.

Each piece is hashed while its copy lies in a core's cache: memory, which is what a copy waits for,
is read once for both. The training waits meanwhile, so its cores are free for more than one thread.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from perdure.core.cores import usable_cores
from perdure.storage import bulk

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LARGE_BYTES = 64 << 10
"""What a tensor must weigh to be copied here; for smaller ones the library's own call is sooner."""
_STEP_BYTES = 512 << 10
"""Half of what a core's cache holds today at least; smaller steps cost more calls."""
_MOST_THREADS = 8
"""Memory is busy with so many on most machines."""


class ImageCopy:
    """One file image and what has yet to be copied to it.

    Args:
        image: The bytes of the file; what no part covers is there already.
        parts: ``(offset in the image, bytes)``, in order, each in one piece.
    """

    def __init__(self, image: Bytes, parts: Sequence[tuple[int, Bytes]]) -> None:
        self._image = image
        self._parts = parts
        self._starts = [start for start, _ in parts]
        # An empty file has one chunk of nothing.
        self.chunks = max(1, -(-image.nbytes // bulk.CHUNK_BYTES))
        self.sums = [""] * self.chunks

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return self._image.nbytes

    def copy_chunk(self, index: int) -> None:
        """Copy what belongs to one chunk and take its checksum. Chunks may be taken in parallel."""
        position = index * bulk.CHUNK_BYTES
        end = min(self._image.nbytes, position + bulk.CHUNK_BYTES)
        state = xxhash.xxh3_128()
        first = max(0, bisect.bisect_right(self._starts, position) - 1)
        for number in range(first, len(self._parts)):
            start, data = self._parts[number]
            if start >= end:
                break
            stop = min(end, start + data.nbytes)
            if position < start:
                state.update(self._image[position:start].data)
                position = start
            while position < stop:
                upto = min(stop, position + _STEP_BYTES)
                place = self._image[position:upto]
                np.copyto(place, data[position - start : upto - start])
                state.update(place.data)
                position = upto
        state.update(self._image[position:end].data)
        self.sums[index] = state.hexdigest()


def copy_images(copies: Mapping[str, ImageCopy]) -> dict[str, tuple[str, ...]]:
    """Copy all parts; returns xxh3-128 of the chunks of each image, in hex."""
    chunks = deque((copy, index) for copy in copies.values() for index in range(copy.chunks))

    def work() -> None:
        while chunks:
            try:
                copy, index = chunks.popleft()
            except IndexError:  # Another thread has taken the last one.
                return
            copy.copy_chunk(index)

    with contextlib.ExitStack() as others:
        size = sum(copy.nbytes for copy in copies.values())
        most = min(_MOST_THREADS, size // bulk.CHUNK_BYTES)
        # To ask for the cores takes as long as to copy a megabyte.
        helpers = _start(work, min(most, usable_cores()) - 1 if most > 1 else 0, others)
        # If this ends early, the helpers are waited for: they have nothing left to begin then.
        others.callback(chunks.clear)
        work()
        for helper in helpers:
            helper.result()
    return {path: tuple(copy.sums) for path, copy in copies.items()}


def _start(
    work: Callable[[], None], threads: int, held: contextlib.ExitStack
) -> list[Future[None]]:
    """Have up to so many threads join in; the caller does without those that cannot start."""
    helpers: list[Future[None]] = []
    if threads > 0:
        pool = held.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="staging"))
        with contextlib.suppress(RuntimeError):
            helpers.extend(pool.submit(work) for _ in range(threads))
    return helpers
