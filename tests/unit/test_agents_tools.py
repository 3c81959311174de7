"""Calls as models write them, and what tools say of them."""

from __future__ import annotations

import asyncio
import time

import pytest

from perdure.agents.expressions import calculate, evaluate
from perdure.agents.loops import shorten
from perdure.agents.parsing import parse_calls
from perdure.agents.tools import TOOLS, accepted
from perdure.core.agent_api import CallKey, ToolCall, ToolError
from perdure.core.ids import GroupId, SessionId

KEY = CallKey(SessionId(GroupId(0), 0), 0, 0, 0)


def result(text: str) -> str:
    (call,) = parse_calls(text)
    tool, arguments = accepted(call, TOOLS)
    return asyncio.run(tool.call(KEY, arguments))


@pytest.mark.parametrize(
    "text",
    [
        "<tool>calculator(12+34)</tool>",
        "I add. <tool> calculator ( 12+34 ) </tool>",
        '<tool>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool>',
        '<tool>{"name": "calculator", "arguments": "{\\"expression\\": \\"12+34\\"}"}</tool>',
        '<tool>{"name": "calculator", "arguments": "12+34"}</tool>',
        "<tool>broken <tool>calculator(12+34)</tool>",
        "<tool>python_expression(sum([12, 34]))</tool>",
        '<tool>{"name": "calculator", "arguments": {"expression": 46}}</tool>',
    ],
)
def test_a_call_is_understood(text: str) -> None:
    assert result(text) == "46"


@pytest.mark.parametrize(
    "text", ["no call", "<tool>calculator(1)", "calculator(1)</tool>", "</tool>", ""]
)
def test_what_does_not_close_a_call_is_none(text: str) -> None:
    assert parse_calls(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool>abacus(1)</tool>", "unknown tool abacus; known: calculator, python_expression"),
        ("<tool>{'name': 1}</tool>", "invalid JSON"),
        ("<tool>[]</tool>", "empty list"),
        ("<tool>[1]</tool>", "JSON object"),
        ('<tool>{"arguments": {}}</tool>', "needs a name"),
        ('<tool>{"name": "calculator"}</tool>', "takes expression; wrong: expression"),
        ('<tool>{"name": "calculator", "arguments": null}</tool>', "wrong: expression"),
        ('<tool>{"name": "calculator", "arguments": {}}</tool>', "wrong: expression"),
        ('<tool>{"name": "calculator", "arguments": {"x": 1}}</tool>', "wrong: expression, x"),
        ('<tool>{"name": "calculator", "arguments": [1]}</tool>', "JSON object"),
        ('<tool>{"name": "calculator", "arguments": {"expression": []}}</tool>', "is text"),
        ("<tool>calculator()</tool>", "wrong: expression"),
        ("<tool>12+34</tool>", "write name(arguments)"),
        ("<tool>calculator(1/0)</tool>", "ZeroDivisionError"),
        ("<tool>calculator(one)</tool>", "only numbers"),
    ],
)
def test_a_wrong_call_is_told_why(text: str, said: str) -> None:
    with pytest.raises(ToolError, match=said.replace("(", r"\(").replace(")", r"\)")):
        result(text)


def test_several_calls_in_one_list() -> None:
    calls = parse_calls('<tool>[{"name": "a"}, {"name": "b", "arguments": {"x": 1}}]</tool>')
    assert calls == [ToolCall("a", {}), ToolCall("b", {"x": 1})]


@pytest.mark.parametrize(
    ("text", "value"),
    [("7/2", "3.5"), ("6/2", "3"), ("-2**2", "-4"), ("(1+2)*3 % 5", "4"), ("7//2", "3")],
)
def test_arithmetic(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max(3, len([1, 2])) if 2 > 1 else 'no'", "3"),
        ("sorted([3, 1, 2])[-1]", "3"),
        ("1 < 2 < 3 and not 0", "True"),
        ("'a' + 'b'", "'ab'"),
        ("round(2.5), round(2.345, 2)", "(2, 2.35)"),
    ],
)
def test_python_expressions(text: str, value: str) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "2**5000",
        "(-8)**0.5",
        "1" * 300,
        "+".join(["1"] * 120),
        "range(10**9)",
        "round(5, -10**9)",
        "[0] * 10**9",
        "'a' * 10**9",
        "'%s' % 1",
        "().__class__",
        "__import__('os').getcwd()",
        "open('/etc/passwd')",
        "(lambda: 1)()",
        "[x for x in range(3)]",
        "x",
        "'\\x41'",
        "sum(1, start=2)",
        "((((" * 40,
    ],
)
def test_what_is_too_large_or_more_than_an_expression_is_refused_at_once(text: str) -> None:
    started_s = time.perf_counter()
    with pytest.raises(ToolError):
        evaluate(text)
    assert time.perf_counter() - started_s < 0.5


def test_long_results_are_cut_where_it_is_said() -> None:
    text = "0123456789"
    assert shorten(text, 10, "left") == text
    assert shorten(text, 4, "left") == "(truncated)...6789"
    assert shorten(text, 4, "right") == "0123...(truncated)"
    assert shorten(text, 5, "middle") == "01...(truncated)...789"
