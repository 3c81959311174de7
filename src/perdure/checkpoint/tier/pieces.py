"""Files as pieces: every file of a checkpoint is stored as objects of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TypeVar

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.manifest import Manifest, directory_path
from perdure.checkpoint.tier.objects import RemoteUnavailableError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``end`` of the file at ``path`` in the run."""

    path: str
    start: int
    end: int

    @property
    def key(self) -> str:
        return f"{self.path}/{self.start:012x}-{self.end:012x}"

    @property
    def bytes(self) -> int:
        return self.end - self.start


def pieces_of(path: str, size: int, *, piece_bytes: int) -> list[Piece]:
    """The pieces of a file in order; an empty file has none."""
    starts = range(0, size, piece_bytes)
    return [Piece(path, start, min(size, start + piece_bytes)) for start in starts]


def files_of(manifest: Manifest) -> dict[str, FileEntry]:
    """Path in the run → entry of every file of a checkpoint's own, its manifest left out."""
    root = directory_path(manifest.name.directory)
    return {f"{root}/{path}": entry for path, entry in sorted(manifest.files.items())}


def segments_of(manifest: Manifest) -> dict[str, FileEntry]:
    """Path in the run → entry of every segment that a checkpoint shares with others."""
    return {
        one.path: FileEntry.whole(one.bytes, one.checksum)
        for stored in manifest.segments.values()
        for one in stored
    }


def in_order(
    executor: Executor, calls: Iterable[Callable[[], _T]], *, ahead: int, timeout_s: float
) -> Iterator[_T]:
    """Results of the calls in their order, at most ``ahead`` of them running or waiting.

    Raises:
        RemoteUnavailableError: One took longer than ``timeout_s`` after its turn had come.
    """
    running: deque[Future[_T]] = deque()
    try:
        for call in calls:
            running.append(executor.submit(call))
            if len(running) >= ahead:
                yield _result(running.popleft(), timeout_s)
        while running:
            yield _result(running.popleft(), timeout_s)
    finally:
        for future in running:
            future.cancel()


def _result(call: Future[_T], timeout_s: float) -> _T:
    try:
        return call.result(timeout=timeout_s)
    except TimeoutError as error:
        if call.done():
            raise
        call.cancel()
        raise RemoteUnavailableError(
            f"a request has not ended for {timeout_s:g} s",
            where="remote tier",
            rule="nothing waits longer for one request, its repetitions included",
            way_out="what is there stays and the next try goes on; check network and store",
        ) from error
