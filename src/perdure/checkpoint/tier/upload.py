"""Storing one committed checkpoint: its pieces, read back and compared, then its manifest."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from perdure.checkpoint.files import FileEntry
from perdure.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    decode_manifest,
    digest_of,
    directory_path,
)
from perdure.checkpoint.tier.head import separate_ways
from perdure.checkpoint.tier.local_pieces import LocalPieces, ReadPiece
from perdure.checkpoint.tier.objects import ObjectStore, RemoteUnavailableError, chunk_sums
from perdure.checkpoint.tier.options import TierOptions
from perdure.checkpoint.tier.pieces import Piece, files_of, in_order, pieces_of, segments_of
from perdure.core.errors import DamagedError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.storage_api import Storage
from perdure.storage import bulk


def read_committed(
    storage: Storage, directory: str, *, manifest_digest: str
) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint here, and its bytes.

    Raises:
        FileNotFoundError: The checkpoint is gone from the local disk.
        DamagedError: It is not the one that was committed.
    """
    where = f"{directory_path(directory)}/{MANIFEST}"
    data = storage.read(where)
    if digest_of(data) != manifest_digest:
        raise _damaged(where)
    return decode_manifest(data, where=where), data


@dataclass(frozen=True, slots=True)
class Upload:
    """One checkpoint on its way to the remote tier.

    Attributes:
        local: Reads the pieces, ``options.piece_bytes`` each.
        executor: Runs the requests, ``options.parallel`` at a time.
        between: Called in the caller's thread between pieces; may raise to end the upload.
    """

    storage: Storage
    local: LocalPieces
    objects: ObjectStore
    options: TierOptions
    executor: Executor
    faults: FaultHook
    between: Callable[[], None]

    def run(self, manifest: Manifest, data: bytes, *, shared: Collection[str]) -> None:
        """Store all of it; the manifest is the last.

        Pieces that are there are not stored again, so an interrupted upload goes on.

        Args:
            manifest: What to store.
            data: Its bytes; see :func:`read_committed`.
            shared: Segments of checkpoints that are pointed to: not even looked at.

        Raises:
            FileNotFoundError: A file of it is gone from the local disk.
            DamagedError: A local file is not what was committed; the manifest is not stored.
            FencedError: Another checkpoint of this name is there.
            RemoteUnavailableError: The store failed too often.
        """
        root = directory_path(manifest.name.directory)
        segments = segments_of(manifest)
        new = {path: entry for path, entry in segments.items() if path not in shared}
        there = self.objects.list(root)
        for folder in sorted({posixpath.dirname(path) for path in new}):
            there |= self.objects.list(folder)
        for path, entry in (new | files_of(manifest)).items():
            self._store_file(path, entry, there)
        key = f"{root}/{MANIFEST}"
        if not self.objects.create(key, data) and self.objects.read(key) != data:
            raise separate_ways("another checkpoint of this name is in the remote tier", where=key)
        self.faults.reach(FaultPoint.REMOTE_MANIFEST_STORED)

    def _store_file(self, path: str, entry: FileEntry, there: dict[str, int]) -> None:
        if self.storage.size(path) != entry.bytes:
            raise _damaged(path)
        pieces = pieces_of(path, entry.bytes, piece_bytes=self.options.piece_bytes)
        said = {piece: sums for piece in pieces if (sums := _said(entry, piece)) is not None}
        # What comes back is then compared with the manifest: the file itself need not be hashed.
        hashed = None if self.options.read_back and len(said) == len(pieces) else _Hashed(entry)
        with self.local.open(path) as read:
            for _ in self._each(self._store_calls(pieces, read, hashed, there)):
                self.faults.reach(FaultPoint.REMOTE_PIECE_STORED)
                self.between()
        if hashed is not None and not hashed.right:
            raise _damaged(path)
        if self.options.read_back:
            wanted = said if hashed is None else hashed.pieces
            compare = (partial(self._compare, piece, wanted[piece]) for piece in pieces)
            for _ in self._each(compare):
                self.between()

    def _each(self, calls: Iterator[Callable[[], None]]) -> Iterator[None]:
        return in_order(
            self.executor,
            calls,
            ahead=self.options.parallel,
            timeout_s=self.options.call_timeout_s,
        )

    def _store_calls(
        self,
        pieces: list[Piece],
        read: ReadPiece,
        hashed: _Hashed | None,
        there: dict[str, int],
    ) -> Iterator[Callable[[], None]]:
        """Requests for the missing pieces; all of them go into ``hashed`` on the way."""
        for piece in pieces:
            missing = there.get(piece.key) != piece.bytes
            if not missing and hashed is None:
                continue
            view = read(piece, _pass_by if hashed is None else hashed.update)
            if view.nbytes != piece.bytes:
                raise _damaged(piece.path)
            if hashed is not None and self.options.read_back:
                hashed.pieces[piece] = _Sums.of(view, piece.bytes)
            if missing:
                yield partial(self._store, piece, view)

    def _store(self, piece: Piece, view: memoryview) -> None:
        if not self.objects.create(piece.key, view) and not self.options.read_back:
            # Of another size when it was listed, or stored by an attempt whose answer was lost.
            self.objects.overwrite(piece.key, view)

    def _compare(self, piece: Piece, wanted: _Sums) -> None:
        """What is stored is what was committed; a wrong piece is stored once more."""
        if self._stored(piece, wanted.chunk_bytes) == wanted.sums:
            return
        local = self.storage.map(piece.path)[piece.start : piece.end].data
        if _Sums.of(local, wanted.chunk_bytes) != wanted:
            raise _damaged(piece.path)
        self.objects.overwrite(piece.key, local)
        if self._stored(piece, wanted.chunk_bytes) != wanted.sums:
            raise RemoteUnavailableError(
                "reads back differently from what was stored, twice",
                where=piece.key,
                rule="the pointer moves to a checkpoint only after it was read back",
                way_out="check the object store",
            )

    def _stored(self, piece: Piece, chunk_bytes: int) -> tuple[str, ...] | None:
        """Checksums of what is stored; None if nothing is, or more or less than the piece."""
        try:
            size, sums = self.objects.fingerprint(piece.key, chunk_bytes=chunk_bytes)
        except FileNotFoundError:
            return None
        return sums if size == piece.bytes else None


@dataclass(frozen=True, slots=True)
class _Sums:
    """xxh3-128 of each ``chunk_bytes`` of a piece."""

    chunk_bytes: int
    sums: tuple[str, ...]

    @classmethod
    def of(cls, data: memoryview, chunk_bytes: int) -> _Sums:
        return cls(chunk_bytes, chunk_sums([data], chunk_bytes)[1])


class _Hashed:
    """Checksums of what is stored, taken as it goes."""

    def __init__(self, entry: FileEntry) -> None:
        self._wanted = entry.sums
        self._sums = bulk.ChunkSums(entry.chunk_bytes)
        self.pieces: dict[Piece, _Sums] = {}

    def update(self, data: memoryview) -> None:
        """The next bytes of the file."""
        self._sums.update(data)

    @property
    def right(self) -> bool:
        """Whether all that went by is the file that was committed."""
        return self._sums.hexdigests() == self._wanted


def _pass_by(data: memoryview) -> None:
    """What was read is not looked at."""


def _said(entry: FileEntry, piece: Piece) -> _Sums | None:
    """What the manifest says about a piece, if its checksums end where the piece does."""
    size = entry.chunk_bytes
    if piece.start % size or (piece.end % size and piece.end < entry.bytes):
        return None
    return _Sums(size, tuple(entry.sums[piece.start // size : -(-piece.end // size)]))


def _damaged(path: str) -> DamagedError:
    return DamagedError(
        "is not what was committed",
        where=path,
        rule="a checkpoint is shipped only if every byte is right",
        way_out="perdure ckpt verify says what is wrong; the next checkpoint is shipped instead",
    )
