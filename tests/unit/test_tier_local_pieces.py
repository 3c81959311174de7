"""Local pieces are read past the page cache, into buffers that nobody holds any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perdure.checkpoint.tier.local_pieces import LocalPieces
from perdure.checkpoint.tier.pieces import Piece, pieces_of
from perdure.storage import MemoryStorage, PosixStorage, bulk

PIECE = bulk.CHUNK_BYTES + bulk.ALIGNMENT
DATA = np.random.default_rng(0).bytes(3 * PIECE + 5)
AHEAD = 2


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    made = PosixStorage(tmp_path / "run")
    made.make_dirs("")
    made.write_atomic("file", DATA)
    return made


def ignore(data: memoryview) -> None:
    del data


def pieces(size: int = len(DATA)) -> list[Piece]:
    return pieces_of("file", size, piece_bytes=PIECE)


@pytest.mark.parametrize("piece_bytes", [PIECE, bulk.ALIGNMENT, 4095])
def test_the_pieces_are_the_file(storage: PosixStorage, piece_bytes: int) -> None:
    local = LocalPieces(storage, piece_bytes=piece_bytes, ahead=AHEAD)
    size = min(len(DATA), 9 * piece_bytes + 5)
    cut = pieces_of("file", size, piece_bytes=piece_bytes)
    seen = bytearray()
    with local.open("file") as read:
        assert b"".join(bytes(read(piece, seen.extend)) for piece in cut) == DATA[:size]
    assert seen == DATA[:size]


def test_a_storage_that_is_no_disk_is_mapped() -> None:
    storage = MemoryStorage()
    storage.make_dirs("")
    storage.write_atomic("file", DATA)
    with LocalPieces(storage, piece_bytes=PIECE, ahead=AHEAD).open("file") as read:
        assert b"".join(bytes(read(piece, ignore)) for piece in pieces()) == DATA


def test_what_is_still_being_sent_is_not_written_over(storage: PosixStorage) -> None:
    with LocalPieces(storage, piece_bytes=PIECE, ahead=AHEAD).open("file") as read:
        given_up = np.frombuffer(memoryview(read(pieces()[0], ignore))[3:], np.uint8)
        others = [bytes(read(piece, ignore)) for piece in pieces()[1:]]
    assert given_up.tobytes() == DATA[3:PIECE]
    assert b"".join(others) == DATA[PIECE:]


def test_what_nobody_holds_any_more_is_used_again(storage: PosixStorage) -> None:
    places: set[int] = set()
    with LocalPieces(storage, piece_bytes=PIECE, ahead=AHEAD).open("file") as read:
        for piece in pieces():
            places.add(np.frombuffer(read(piece, ignore), np.uint8).__array_interface__["data"][0])
    assert len(places) == AHEAD


def test_a_file_that_got_shorter_gives_fewer_bytes(storage: PosixStorage) -> None:
    with LocalPieces(storage, piece_bytes=PIECE, ahead=AHEAD).open("file") as read:
        with open(storage.full("file"), "r+b") as file:
            file.truncate(PIECE + 7)
        got = [bytes(read(piece, ignore)) for piece in pieces()]
    assert got == [DATA[:PIECE], DATA[PIECE : PIECE + 7], b"", b""]


def test_a_file_that_is_absent_is_said(storage: PosixStorage) -> None:
    local = LocalPieces(storage, piece_bytes=PIECE, ahead=AHEAD)
    with pytest.raises(FileNotFoundError), local.open("absent"):
        pass
