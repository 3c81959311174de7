"""The published format of the remote pointer is read, whole or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from head_cases import HEAD, HEADS
from tier_cases import memory_objects

from perdure.checkpoint.tier import read_head
from perdure.checkpoint.tier.head import FORMAT
from perdure.core import sealed_json
from perdure.core.errors import DamagedError, FutureFormatError

FOLDER = Path(__file__).parents[1] / "golden" / "remote-v1"
GOLDEN = (FOLDER / "head.json").read_bytes()


def stored(data: bytes) -> Any:
    objects = memory_objects()
    objects.create("head.json", data)
    return read_head(objects)


def changed(**fields: Any) -> bytes:
    """The golden pointer with other fields, sealed again."""
    value = {**json.loads(GOLDEN), **fields}
    value.pop("digest")
    return sealed_json.encode(value)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_format_1_is_read_and_written_byte_for_byte(name: str) -> None:
    golden = (FOLDER / name).read_bytes()
    assert stored(golden) == HEADS[name]
    assert HEADS[name].encode() == golden


def test_only_what_is_cut_otherwise_asks_for_a_reader_that_knows_it() -> None:
    features = {name: json.loads((FOLDER / name).read_bytes())["features"] for name in HEADS}
    assert features == {"head.json": [], "head-cut-otherwise.json": ["segment_piece_bytes"]}


def test_every_flipped_bit_of_it_is_found() -> None:
    for position in range(8 * len(GOLDEN)):
        data = bytearray(GOLDEN)
        data[position // 8] ^= 1 << position % 8
        with pytest.raises((DamagedError, FutureFormatError)):
            stored(bytes(data))


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"format": FORMAT + 1}, "format"), ({"features": ["holograms"]}, "holograms")],
)
def test_the_future_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(FutureFormatError, match=said):
        stored(changed(**fields))


@pytest.mark.parametrize("field", sorted(json.loads(GOLDEN).keys() - {"format", "digest"}))
def test_a_field_that_is_missing_is_damage(field: str) -> None:
    value = json.loads(GOLDEN)
    value.pop("digest")
    value.pop(field)
    data = sealed_json.encode(value)
    if field == "features":
        assert stored(data) == HEAD
        return
    with pytest.raises(DamagedError):
        stored(data)
