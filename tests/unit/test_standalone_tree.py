"""Plain data to tensors and small values and back, exactly; live objects stay what they are."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.standalone import tree

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**130), 2**130),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.floats(width=32).map(np.float32),
    st.integers(-5, 5).map(np.int64),
)
NUMPY_KEYS = st.integers(10, 19).map(np.int64)
KEYS = st.one_of(
    st.text(max_size=4),
    st.integers(-9, 9),
    st.just("$tensor"),
    st.booleans(),
    NUMPY_KEYS,
    st.tuples(NUMPY_KEYS, st.integers(-9, 9)),
)
DATA = st.recursive(
    st.one_of(SCALARS, st.lists(st.floats(), max_size=3).map(np.array)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=3)),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


def stored(value: Any) -> Any:
    """``value`` as a checkpoint gives it back."""
    tensors: dict[str, Any] = {}
    values = msgpack.packb(tree.split(value, tensors))
    read = msgpack.unpackb(values, strict_map_key=False)
    arrays = {
        name: np.array(t) if isinstance(t, np.ndarray) else t.clone() for name, t in tensors.items()
    }
    return tree.join(read, arrays)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, again in zip(one, other, strict=True):
            assert_same(key, again)
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    else:
        assert one == other


@given(DATA)
def test_round_trip_is_exact(value: Any) -> None:
    assert tree.is_data(value)
    try:
        assert_same(stored(value), value)
    except ValueError as error:
        # Two keys that read the same as text would share a name.
        assert "two parts are called" in str(error)


def test_keys_of_numpy_are_not_taken_for_their_values() -> None:
    table = {np.int64(1): np.float64(0.5), (np.int64(2), 3): np.float64(0.25)}
    assert_same(stored(table), table)


@pytest.mark.parametrize(
    "value",
    [{"a": [object()]}, {"a": {1, 2}}, [len], {"a": {"b": slice(1)}}, complex(1, 2), range(3)],
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any) -> None:
    assert not tree.is_data(value)
    with pytest.raises(ValueError, match="holds a builtins"):
        tree.split(value, {})


def test_an_array_with_a_mask_would_come_back_without_it() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    assert not tree.is_data({"a": masked})
    with pytest.raises(ValueError, match=r"holds a numpy\.ma.*MaskedArray at a"):
        tree.split({"a": masked}, {})


def test_the_place_of_a_refused_part_is_named() -> None:
    with pytest.raises(ValueError, match=r"holds a builtins\.set at a/0/b"):
        tree.split({"a": [{"b": {1}}]}, {})


def test_containers_and_arrays_stay_the_objects_they_are() -> None:
    array, inner, window = np.zeros(3), {"x": 1}, deque([1.0], maxlen=4)
    parameter = torch.nn.Parameter(torch.zeros(2))
    live = {"array": array, "inner": inner, "window": window, "p": parameter, "items": [array]}
    other = {
        "array": np.arange(3.0),
        "inner": {"x": 2, "grown": 3},
        "window": deque([5.0, 6.0], maxlen=4),
        "p": torch.ones(2),
        "items": [np.arange(3.0), "more"],
    }
    assert tree.taken_over(live, stored(other)) is live
    assert live["array"] is array
    assert array.tolist() == [0, 1, 2]
    assert live["inner"] is inner
    assert inner == {"x": 2, "grown": 3}
    assert live["window"] is window
    assert list(window) == [5.0, 6.0]
    assert live["p"] is parameter
    assert parameter.tolist() == [1, 1]
    assert live["items"][0] is array
    assert live["items"][1] == "more"


def test_views_of_one_array_stay_views() -> None:
    base = np.zeros(4)
    live = {"all": base, "half": base[:2]}
    tree.taken_over(live, stored({"all": np.arange(4.0), "half": np.arange(2.0)}))
    live["all"][0] = 9.0
    assert live["half"][0] == 9.0


def test_an_array_may_have_grown_along_its_first_axis_only() -> None:
    live = {"rows": np.zeros((0, 3))}
    tree.taken_over(live, stored({"rows": np.ones((5, 3))}))
    assert live["rows"].shape == (5, 3)
    for wrong in (np.ones((5, 4)), np.ones(5), np.ones((5, 3), np.float32)):
        with pytest.raises(ValueError, match=r"rows is .* in the checkpoint"):
            tree.taken_over({"rows": np.zeros((0, 3))}, stored({"rows": wrong}))


@pytest.mark.parametrize(
    ("live", "other", "message"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, "b is not in the checkpoint"),
        ({"a": {"b": 1}}, {"a": 3}, "a is a dict here and a int"),
        ({"a": [1]}, {"a": (1,)}, "a is a list here and a tuple"),
        ({"a": deque(maxlen=3)}, {"a": deque(maxlen=4)}, "a holds 3 here and 4 there"),
        ({"a": np.zeros(2)}, {"a": 1.0}, "a is a ndarray here and a float"),
    ],
)
def test_what_does_not_fit_is_refused(live: Any, other: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.taken_over(live, stored(other))


def test_kinds_of_dictionaries_are_kept() -> None:
    live = {"c": Counter("a"), "o": OrderedDict(x=1)}
    tree.taken_over(live, stored({"c": Counter("aab"), "o": OrderedDict(x=2)}))
    assert live == {"c": Counter("aab"), "o": OrderedDict(x=2)}
    assert type(live["c"]) is Counter


def test_types_of_torch_that_numpy_lacks() -> None:
    value = {"half": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0)}
    assert stored(value)["half"].dtype == torch.bfloat16
    assert tree.differences(value, stored(value)) == []
    assert tree.differences(value, {**value, "half": torch.zeros(3, dtype=torch.bfloat16)}) != []


def test_differences_are_told_apart_by_bits() -> None:
    same = {"a": [1, 2.5, math.nan], "b": np.array([math.nan, -0.0])}
    assert tree.differences(same, stored(same)) == []
    assert tree.differences({"b": np.array([0.0])}, {"b": np.array([-0.0])}) != []
    assert tree.differences({"a": 1}, {"a": 1, "more": 2}) == []
    assert tree.differences({"a": [1, 2]}, {"a": [1]}) == ["a has 1 items instead of 2"]
    assert tree.differences({"a": {"b": 7}}, {"a": {"b": 0}}) == ["a/b is 0 instead of 7"]
    assert tree.differences({"a": 1}, {}) == ["a is gone"]
