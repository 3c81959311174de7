"""Sealed JSON: any change of content is damage, white space is not, newer formats are said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core import sealed_json
from perdure.core.errors import DamagedError, FutureFormatError

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.text("abcdeé", min_size=1, max_size=3), _VALUES, max_size=4).map(
    lambda value: {**value, "format": 1}
)


def _decode(data: bytes) -> dict[str, Any]:
    return sealed_json.decode(data, where="run.json", newest_format=1)


@given(value=_OBJECTS)
def test_an_object_reads_back(value: dict[str, Any]) -> None:
    assert _decode(sealed_json.encode(value)) == value


@given(value=_OBJECTS, long=_OBJECTS)
def test_fields_that_are_canonical_already_read_back(
    value: dict[str, Any], long: dict[str, Any]
) -> None:
    texts = {key: sealed_json.canonical(field) for key, field in long.items()}
    assert _decode(sealed_json.encode(value, long=texts)) == {**value, **long}


@given(value=_OBJECTS)
def test_white_space_and_key_order_do_not_matter(value: dict[str, Any]) -> None:
    sealed = json.loads(sealed_json.encode(value))
    shuffled = {key: sealed[key] for key in sorted(sealed, reverse=True)}
    assert _decode(json.dumps(shuffled, indent=7, ensure_ascii=False).encode()) == value


def test_keys_and_sequences_read_back_as_json_has_them() -> None:
    value = {"format": 1, "segments": {10: (1, 2), 9: ()}}
    assert _decode(sealed_json.encode(value)) == {
        "format": 1,
        "segments": {"9": [], "10": [1, 2]},
    }


def test_every_flipped_bit_is_damage_or_harmless() -> None:
    value = {"format": 1, "run_id": "00ff", "count": 12, "name": "é"}
    data = sealed_json.encode(value)
    harmless = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert _decode(bytes(flipped)) == value
            harmless += 1
        except DamagedError as error:
            assert error.where == "run.json"
    assert harmless < 40, "only white space may change unnoticed"


@pytest.mark.parametrize("length", [0, 1, 10, -2])
def test_a_truncated_file_is_damage(length: int) -> None:
    data = sealed_json.encode({"format": 1, "run_id": "00ff"})
    with pytest.raises(DamagedError, match="not a sealed JSON object"):
        _decode(data[:length])


@pytest.mark.parametrize(
    "data",
    [b"[]", b"1", b"null", b"{}", b'{"format": 1}', b"\xff\xfe", b'"digest"', b"[" * 10**5],
    ids=range(8),
)
def test_other_json_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        _decode(data)


@pytest.mark.parametrize("digest", ["", 5, None, "0" * 32])
def test_a_wrong_digest_is_damage(digest: object) -> None:
    sealed = json.loads(sealed_json.encode({"format": 1}))
    sealed["digest"] = digest
    with pytest.raises(DamagedError, match="digest does not match"):
        _decode(json.dumps(sealed).encode())


def test_a_newer_format_is_not_damage() -> None:
    data = sealed_json.encode({"format": 2})
    with pytest.raises(FutureFormatError, match="format 2 is newer than 1"):
        _decode(data)


def test_an_object_without_format_is_not_written() -> None:
    with pytest.raises(AssertionError):
        sealed_json.encode({"run_id": "x"})
