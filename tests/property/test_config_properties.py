"""Any text, number or nesting survives YAML and overrides; nothing but ``ConfigError`` escapes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perdure.config import Section, config_from_text, nearest, render_yaml, yaml_text
from perdure.config.overrides import apply_overrides
from perdure.core.errors import ConfigError

KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=12)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["1e-4", "off", "Yes", "~", "null", "010", "1:30", ".5", "0x10", "<<", "="])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


class Loose(Section):
    number: float = 0.0
    words: tuple[str, ...] = ()
    table: dict[str, int] = {}


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_yaml_round_trip(value: dict[str, Any]) -> None:
    assert yaml_text.parse(yaml_text.render(value), where="x") == value


@given(st.lists(KEYS, min_size=1, max_size=4), VALUES)
def test_an_override_sets_its_key_and_nothing_else(path: list[str], value: object) -> None:
    flow = yaml_text.render({"v": value}).removeprefix("v:")
    data: dict[str, Any] = {"untouched!": [1]}
    assert apply_overrides(data, [f"{'.'.join(path)}={_one_line(value, flow)}"]) == []
    node: Any = data
    for name in path:
        assert len(node) == 1 + (node is data)
        node = node[name]
    assert node == value
    assert data["untouched!"] == [1]


def _one_line(value: object, block: str) -> str:
    import json

    return json.dumps(value) if isinstance(value, str | list | dict) else block.strip()


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(TEXT, max_size=3),
    st.dictionaries(TEXT, INTEGERS, max_size=3),
)
def test_sections_round_trip(number: float, words: list[str], table: dict[str, int]) -> None:
    config = Loose(number=number, words=tuple(words), table=table)
    assert config_from_text(Loose, render_yaml(config), where="x") == config


@given(st.text(max_size=40), st.lists(st.text(max_size=20), max_size=2))
def test_no_text_escapes_as_anything_but_a_config_error(text: str, overrides: list[str]) -> None:
    try:
        config_from_text(Loose, text, where="x", overrides=overrides)
    except ConfigError as error:
        assert str(error)


@given(VALUES)
def test_no_value_escapes_as_anything_but_a_config_error(value: object) -> None:
    try:
        config_from_text(Loose, yaml_text.render({"words": value, "number": value}), where="x")
    except ConfigError as error:
        assert str(error)


@given(st.lists(KEYS, min_size=1))
def test_a_valid_name_is_nearest_to_itself(names: list[str]) -> None:
    found = nearest(names[0], names)
    assert found is not None
    assert found.casefold() == names[0].casefold()
