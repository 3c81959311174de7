"""Whatever a model writes, reading its calls never raises and never runs anything."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from perdure.agents.expressions import calculate, evaluate
from perdure.agents.parsing import parse_calls
from perdure.agents.tools import TOOLS, accepted
from perdure.core.agent_api import ToolError

FRAGMENTS = st.sampled_from(
    [
        *("<tool>", "</tool>", "{", "}", "[", "]", "(", ")", ":", ",", "'", " ", "null", "NaN"),
        *('"name"', '"arguments"', "calculator", '"calculator"', "1+2", "\\ud800", "1e999"),
        "__import__('os')",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(FRAGMENTS, max_size=30).map("".join))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def run(text: str) -> None:
    """As a session does, without an event loop: every call ends in text or in a ToolError."""
    for call in parse_calls(text):
        call.name.encode()
        try:
            tool, arguments = accepted(call, TOOLS)
            coroutine = tool.call(None, arguments)  # type: ignore[arg-type]
            try:
                coroutine.send(None)
            except StopIteration as done:
                assert isinstance(done.value, str)
        except ToolError as error:
            str(error).encode()


@given(TEXTS)
@example('<tool>{"name": "\\ud800", "arguments": {"expression": "\\ud800"}}</tool>')
@example('<tool>{"name": "calculator", "arguments": {"\\ud800": 1}}</tool>')
@example("<tool>" + "[" * 5000 + "</tool>")
@example('<tool>{"name": "calculator", "arguments": ' + "9" * 5000 + "}</tool>")
def test_no_text_makes_it_raise(text: str) -> None:
    run(text)
    run(f"<tool>{text}</tool>")
    run(f"<tool>calculator({text})</tool>")
    run(f"<tool>python_expression({text})</tool>")


@given(st.sampled_from(["calculator", "python_expression", "other"]), JSON)
def test_any_json_arguments_end_in_a_result_or_an_error(name: str, arguments: object) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    run(f"<tool>{call}</tool>")
    run(f"<tool>[{call}, {call}]</tool>")


@given(st.integers(), st.integers(), st.sampled_from(["+", "-", "*"]))
def test_integers_are_exact(left: int, right: int, sign: str) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
    text = f"({left}){sign}({right})"
    assert calculate(text) == evaluate(text) == str(expected)


@given(st.text(alphabet="0123456789+-*/%(). <>=abelnrgsumdivoxitrang,[]'\"", max_size=60))
def test_an_expression_has_a_short_value_or_is_refused(text: str) -> None:
    for compute in (calculate, evaluate):
        try:
            assert len(compute(text)) < 10**6
        except ToolError as error:
            assert len(str(error)) < 300
