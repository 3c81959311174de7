"""Directories for published weights: one a process, and nothing left of those that were killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.core.errors import StorageError
from perdure.publish import weights_directory
from perdure.storage import PosixStorage


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_directory_is_removed_with_all_it_holds(tmp_path: Path) -> None:
    with weights_directory(10, places=[tmp_path]) as directory:
        assert directory.parent == tmp_path
        directory.mkdir()
        (directory / "weights").write_bytes(b"w")
    assert names(tmp_path) == []


def test_live_directories_do_not_disturb_each_other(tmp_path: Path) -> None:
    with weights_directory(10, places=[tmp_path]) as one:
        one.mkdir()
        with weights_directory(10, places=[tmp_path]) as other:
            other.mkdir()
            assert one.exists()
        assert one.exists()
        assert not other.exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    with weights_directory(10, places=[tmp_path]) as directory:
        left = directory.name
    # As after a kill: the files are there and nobody holds the lock.
    (tmp_path / left).mkdir()
    (tmp_path / left / "weights").write_bytes(b"w")
    (tmp_path / f"{left}.lock").touch()
    (tmp_path / "perdure-weights-other").mkdir()
    with weights_directory(10, places=[tmp_path]) as directory:
        assert names(tmp_path) == sorted([f"{directory.name}.lock", "perdure-weights-other"])


def test_the_first_place_with_room_is_taken(tmp_path: Path) -> None:
    with weights_directory(10, places=[tmp_path / "absent", tmp_path]) as directory:
        assert directory.parent == tmp_path
    with (
        pytest.raises(StorageError, match=r"no room.*free: .*GiB.*two versions of the weights"),
        weights_directory(2**60, places=[tmp_path / "absent", tmp_path]),
    ):
        pass
    assert names(tmp_path) == []


def test_a_lock_of_a_live_process_is_respected(tmp_path: Path) -> None:
    with weights_directory(10, places=[tmp_path]) as directory:
        assert PosixStorage(tmp_path).lock(f"{directory.name}.lock") is None
