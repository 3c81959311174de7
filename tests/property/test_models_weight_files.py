"""Weights in a file: what comes out is what went in, or a refusal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import DamagedError, StorageError
from perdure.core.rollout_api import WeightFile
from perdure.models.digest import digest_weights
from perdure.models.weight_files import read_weights, write_weights
from perdure.storage import (
    FaultyStorage,
    MemoryStorage,
    PosixStorage,
    StorageFault,
    StorageFaultKind,
)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    SHAPES,
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**32),
)
WEIGHTS = st.dictionaries(st.text(min_size=1, max_size=9), TENSORS, max_size=5)


@given(weights=WEIGHTS, data=st.data())
def test_round_trip_and_any_changed_byte_or_length_is_refused(
    weights: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checksum = write_weights(PosixStorage(Path(directory)), "w", weights)
        path = Path(directory, "w")
        assert [each.name for each in Path(directory).iterdir()] == ["w"]
        found = read_weights(WeightFile(str(path), checksum))
        assert list(found) == list(weights)
        assert digest_weights(found) == digest_weights(weights)
        del found
        whole = path.read_bytes()
        place = data.draw(st.integers(0, len(whole) - 1))
        flipped = bytes([whole[place] ^ data.draw(st.integers(1, 255))])
        for damaged in (
            whole[:place] + flipped + whole[place + 1 :],
            whole[:place],
            whole + b"\0",
        ):
            path.write_bytes(damaged)
            with pytest.raises(DamagedError, match="weights"):
                read_weights(WeightFile(str(path), checksum))


def test_absent_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="cannot be read"):
        read_weights(WeightFile(str(tmp_path / "none"), "00"))


def test_types_that_engines_do_not_load_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight big is float64"):
        write_weights(MemoryStorage(), "w", {"big": torch.zeros(1, dtype=torch.float64)})


def test_a_full_disk_leaves_no_file_of_that_name() -> None:
    full = StorageFault(StorageFaultKind.NO_SPACE, hit=3, path_contains="w")
    storage = FaultyStorage(MemoryStorage(), plan=[full])
    with pytest.raises(StorageError):
        write_weights(storage, "w", {"a": torch.zeros(1000)})
    assert storage.fired[StorageFaultKind.NO_SPACE] == 1
    assert not storage.exists("w")
    assert write_weights(storage, "w", {"a": torch.zeros(1000)})
    assert storage.list("") == ["w"]
