"""Keyed random streams and digests depend on their key or content and on nothing else."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.digests import digest_arrays, digest_values
from perdure.core.keyed_random import generator, key_of, seed_63


def test_a_key_names_a_stream() -> None:
    first = generator(7, "shuffle", 3, 1).random(5)
    generator(7, "noise").random(100)
    assert np.array_equal(first, generator(7, "shuffle", 3, 1).random(5))


def test_known_values_never_change() -> None:
    """Runs made by an earlier version must redo to the same weights."""
    assert key_of(1, "a", 2, 3) == 0x6F5742BC8EF53948A16FF446FE49E206
    assert generator(1, "a", 2, 3).integers(2**32, size=3).tolist() == [
        2729484846,
        3079236821,
        2341984351,
    ]
    assert seed_63(1, "a", 2, 3) == 4011477319401774244


@given(
    st.lists(
        st.tuples(st.integers(), st.text(), st.lists(st.integers())), min_size=2, unique_by=str
    )
)
def test_other_keys_give_other_streams(keys: list[tuple[int, str, list[int]]]) -> None:
    texts = {(seed, purpose, tuple(numbers)) for seed, purpose, numbers in keys}
    assert len({key_of(seed, purpose, *numbers) for seed, purpose, numbers in texts}) == len(texts)


@given(st.integers(), st.lists(st.integers(), max_size=4))
def test_a_63_bit_seed_fits_a_signed_integer(seed: int, numbers: list[int]) -> None:
    assert 0 <= seed_63(seed, "purpose", *numbers) < 2**63


def test_numpy_integers_are_keys_like_python_ones() -> None:
    assert key_of(1, "a", np.int64(2)) == key_of(1, "a", 2)  # type: ignore[arg-type]


def test_a_digest_of_arrays_ignores_order_and_memory_layout() -> None:
    matrix = np.arange(12, dtype="<f4").reshape(3, 4)
    one = {"a": matrix, "b": np.zeros(0, "<i8")}
    other = {"b": np.zeros(0, "<i8"), "a": np.asfortranarray(matrix)}
    assert digest_arrays(one) == digest_arrays(other)
    assert digest_arrays({"a": matrix[:, ::2]}) == digest_arrays({"a": matrix[:, ::2].copy()})


@pytest.mark.parametrize(
    "changed",
    [
        {"b": np.arange(4, dtype="<i4")},
        {"a": np.arange(4, dtype="<u4")},
        {"a": np.arange(4, dtype="<i4").reshape(2, 2)},
        {"a": np.array([0, 1, 2, 4], "<i4")},
        {"a": np.arange(4, dtype="<i4"), "c": np.zeros(0, "<i4")},
        {},
    ],
)
def test_a_digest_of_arrays_sees_names_dtypes_shapes_and_values(
    changed: dict[str, np.ndarray],
) -> None:
    assert digest_arrays(changed) != digest_arrays({"a": np.arange(4, dtype="<i4")})


def test_a_digest_of_arrays_sees_every_bit_even_of_zeros_and_nans() -> None:
    zero, minus = np.array([0.0]), np.array([-0.0])
    assert digest_arrays({"a": zero}) != digest_arrays({"a": minus})
    nan = np.array([np.nan])
    assert digest_arrays({"a": nan}) == digest_arrays({"a": nan.copy()})


def test_a_digest_of_values_ignores_key_order_and_sequence_type() -> None:
    one = {"a": [1, 2, {"x": 1, "y": None}], "b": b"bytes"}
    other = {"b": b"bytes", "a": (1, 2, {"y": None, "x": 1})}
    assert digest_values(one) == digest_values(other)


@pytest.mark.parametrize("changed", [{"a": 2}, {"a": 1.0}, {"a": "1"}, {"b": 1}, {"a": [1]}, [1]])
def test_a_digest_of_values_sees_keys_types_and_values(changed: object) -> None:
    assert digest_values(changed) != digest_values({"a": 1})


def test_digests_and_streams_are_the_same_in_another_process() -> None:
    code = (
        "from perdure.core.digests import digest_values\n"
        "from perdure.core.keyed_random import key_of\n"
        "print(digest_values({'b': 1, 'a': {'d': 2, 'c': 3}}), key_of(3, 'x', 4))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = f"{digest_values({'a': {'c': 3, 'd': 2}, 'b': 1})} {key_of(3, 'x', 4)}"
    assert out.stdout.strip() == expected
