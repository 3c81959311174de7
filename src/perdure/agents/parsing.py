"""Tool calls in a model's text. Nothing in it is ever executed, and no text makes this raise.

A call stands between ``<tool>`` and ``</tool>``: ``calculator(1+2)``, or as JSON
``{"name": "calculator", "arguments": {"expression": "1+2"}}``, or a JSON list of such objects.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from perdure.core.agent_api import CALL_CLOSING, CALL_OPENING, ToolCall

_WRITTEN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*\((.*)\)", re.DOTALL)
_MAX_NAME = 64
_MAX_BRACKETS = 100
"""Of a call in JSON: deeper nesting than a reader follows is refused."""


def parse_calls(text: str) -> list[ToolCall]:
    """The calls of a turn that ends with ``</tool>``; none if it does not, or nothing opens them.

    What cannot be understood is a call with a ``problem``, so that the model is told.
    """
    body = text.removesuffix(CALL_CLOSING)
    if body == text or CALL_OPENING not in body:
        return []
    body = body.rpartition(CALL_OPENING)[2].strip()
    if body[:1] in ("{", "["):
        return _from_json(body)
    written = _WRITTEN.fullmatch(body)
    if written is None:
        return [_not_understood("write name(arguments) or JSON between the tags")]
    return [ToolCall(written[1][:_MAX_NAME], written[2].strip())]


def _from_json(body: str) -> list[ToolCall]:
    if body.count("[") + body.count("{") > _MAX_BRACKETS:
        return [_not_understood("too many brackets")]
    try:
        value: Any = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return [_not_understood(f"invalid JSON ({str(error)[:80]})")]
    if not isinstance(value, list):
        return [_from_value(value)]
    values = cast("list[object]", value)
    return [_from_value(one) for one in values] or [_not_understood("an empty list of calls")]


def _from_value(value: object) -> ToolCall:
    if not isinstance(value, dict):
        return _not_understood("a call is a JSON object")
    fields = cast("dict[str, object]", value)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return _not_understood("a call needs a name")
    name = storable(name)[:_MAX_NAME]
    arguments = fields.get("arguments")
    if arguments is None:
        return ToolCall(name, {})
    if isinstance(arguments, str):
        # Some models write the object as a string.
        return ToolCall(name, _object_in(arguments) or storable(arguments))
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "arguments are a JSON object")
    return ToolCall(name, cast("dict[str, object]", arguments))


def _object_in(text: str) -> dict[str, object] | None:
    try:
        value: Any = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _not_understood(problem: str) -> ToolCall:
    return ToolCall("", {}, problem)


def storable(text: str) -> str:
    """The text without what no file can hold: JSON escapes may spell half a character."""
    return text.encode("utf-8", "replace").decode()
