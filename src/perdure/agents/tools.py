"""The tools in the box, and the check of what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perdure.agents.expressions import calculate, evaluate
from perdure.agents.parsing import storable
from perdure.core.agent_api import (
    Arguments,
    CallKey,
    StatefulTool,
    Tool,
    ToolCall,
    ToolError,
    ToolKind,
)
from perdure.core.errors import ConfigError
from perdure.core.imported import made, members_of


@dataclass(frozen=True, slots=True)
class ExpressionTool:
    """A stateless tool of one parameter, ``expression``, that is quick."""

    name: str
    compute: Callable[[str], str]
    parameters: tuple[str, ...] = ("expression",)
    kind: ToolKind = ToolKind.STATELESS

    async def call(self, key: CallKey, arguments: Arguments) -> str:
        """See :class:`~perdure.core.agent_api.Tool`."""
        del key
        expression = arguments["expression"]
        if isinstance(expression, int | float) and not isinstance(expression, bool):
            expression = repr(expression)
        if not isinstance(expression, str):
            raise ToolError("expression is text")
        return self.compute(expression)


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        "calculator": ExpressionTool("calculator", calculate),
        "python_expression": ExpressionTool("python_expression", evaluate),
    }
)
"""By name."""


def own_tool(source: str) -> Tool:
    """The tool that the class or function at ``module:Name`` makes without arguments.

    Raises:
        ConfigError: It cannot be imported, or lacks a member of what its kind promises.
    """
    where = f"agent.tools: {source}"
    tool: Tool = made(source, where=where, members=members_of(Tool))
    if not isinstance(tool.kind, ToolKind):
        raise ConfigError(
            f"its kind is {tool.kind!r}",
            where=where,
            rule="the kind says what is done after a crash",
            way_out="set kind = ToolKind.STATELESS, or that of its state",
        )
    lacking = [name for name in members_of(StatefulTool) if not hasattr(tool, name)]
    if tool.kind is not ToolKind.STATELESS and lacking:
        raise ConfigError(
            f"lacks {', '.join(lacking)}",
            where=where,
            rule=f"a tool of kind {tool.kind.value} is told of its sessions after a crash",
            way_out="add it, or set kind = ToolKind.STATELESS",
        )
    return tool


def accepted(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """The tool that is meant, and its arguments by parameter.

    Raises:
        ToolError: There is no such tool, or the arguments are not its parameters.
    """
    if call.problem:
        raise ToolError(call.problem)
    tool = tools.get(call.name)
    if tool is None:
        raise ToolError(f"unknown tool {call.name}; known: {', '.join(sorted(tools))}")
    arguments = _by_parameter(call.arguments, tool.parameters)
    wrong = set(arguments) ^ set(tool.parameters)
    if wrong:
        names = ", ".join(sorted(storable(name)[:64] for name in wrong))
        raise ToolError(f"{tool.name} takes {', '.join(tool.parameters)}; wrong: {names}")
    return tool, arguments


def _by_parameter(arguments: Arguments | str, parameters: Sequence[str]) -> dict[str, Any]:
    if not isinstance(arguments, str):
        return dict(arguments)
    if not arguments:
        return {}
    if len(parameters) != 1:
        raise ToolError(f"write the arguments as JSON: {', '.join(parameters)}")
    return {parameters[0]: arguments}
