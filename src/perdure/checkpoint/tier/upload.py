"""Storing one committed checkpoint: its pieces, read back and compared, then its manifest."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from perdure.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    decode_manifest,
    digest_of,
    directory_path,
)
from perdure.checkpoint.tier.head import separate_ways
from perdure.checkpoint.tier.objects import ObjectStore, RemoteUnavailableError
from perdure.checkpoint.tier.options import TierOptions
from perdure.checkpoint.tier.pieces import Piece, files_of, in_order, pieces_of, segments_of
from perdure.core.errors import DamagedError
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.storage_api import Storage


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
        executor: Runs the requests, ``options.parallel`` at a time.
        between: Called in the caller's thread between pieces; may raise to end the upload.
    """

    storage: Storage
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
        data = self.storage.map(path)
        if data.nbytes != entry.bytes:
            raise _damaged(path)
        pieces = pieces_of(path, entry.bytes, piece_bytes=self.options.piece_bytes)
        state = xxhash.xxh3_128()
        for _ in self._each(self._store_calls(pieces, data, state, there)):
            self.faults.reach(FaultPoint.REMOTE_PIECE_STORED)
            self.between()
        if state.hexdigest() != entry.checksum:
            raise _damaged(path)
        if self.options.read_back:
            compare = (partial(self._compare, piece, data) for piece in pieces)
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
        data: np.ndarray[tuple[int], np.dtype[np.uint8]],
        state: xxhash.xxh3_128,
        there: dict[str, int],
    ) -> Iterator[Callable[[], None]]:
        """Requests for the missing pieces; hashes all of them on the way."""
        for piece in pieces:
            view = data[piece.start : piece.end].data
            state.update(view)
            if there.get(piece.key) != piece.bytes:
                yield partial(self._store, piece, view)

    def _store(self, piece: Piece, view: memoryview) -> None:
        if not self.objects.create(piece.key, view) and not self.options.read_back:
            # Of another size when it was listed, or stored by an attempt whose answer was lost.
            self.objects.overwrite(piece.key, view)

    def _compare(self, piece: Piece, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """What is stored is what is here; a wrong piece is stored once more."""
        expected = data[piece.start : piece.end].data
        wanted = (piece.bytes, xxhash.xxh3_128_hexdigest(expected))
        if self._stored(piece) == wanted:
            return
        self.objects.overwrite(piece.key, expected)
        if self._stored(piece) != wanted:
            raise RemoteUnavailableError(
                "reads back differently from what was stored, twice",
                where=piece.key,
                rule="the pointer moves to a checkpoint only after it was read back",
                way_out="check the object store",
            )

    def _stored(self, piece: Piece) -> tuple[int, str] | None:
        """Fingerprint of what is stored; None if nothing is."""
        try:
            return self.objects.fingerprint(piece.key)
        except FileNotFoundError:
            return None


def _damaged(path: str) -> DamagedError:
    return DamagedError(
        "is not what was committed",
        where=path,
        rule="a checkpoint is shipped only if every byte is right",
        way_out="perdure ckpt verify says what is wrong; the next checkpoint is shipped instead",
    )
