"""What happens between a prompt and an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from perdure.agents.loops import Side, SingleTurn, ToolAgent
from perdure.agents.tools import TOOLS, own_tool
from perdure.config import OPERATIONAL, Problem, Section
from perdure.core.agent_api import AgentLoop, Tool
from perdure.core.errors import ConfigError
from perdure.core.imported import is_import_path
from perdure.core.names import hint
from perdure.runtime.tool_calls import ToolRules


class AgentConfig(Section):
    """The loop that runs each session, and the tools it may call."""

    loop: Literal["single_turn", "tools"] = "single_turn"
    """One answer, or turns of tool calls and then an answer."""
    tools: tuple[str, ...] = ()
    """Names of the tools: calculator, python_expression, or `module:Name` for one of your own."""
    max_turns: Annotated[int, Field(ge=1)] = 4
    """Turns of calls in a session; behind them a call is only text."""
    max_calls: Annotated[int, Field(ge=1)] = 4
    """Calls in one turn; further ones are answered with an error."""
    max_result_characters: Annotated[int, Field(ge=1)] = 256
    """Longer results are cut."""
    cut_results: Side = "right"
    """The end of a long result that is left out, or its middle."""
    call_timeout_s: Annotated[float, Field(gt=0), OPERATIONAL] = 30.0
    """Longest tool call; one that takes longer is a failure of the infrastructure: its session is
    tried again."""
    tool_exceptions: Literal["fail", "show"] = "fail"
    """An unexpected exception of a tool fails the session, or is shown to the model. Wrong use of a
    tool is always shown."""

    def build(self) -> tuple[AgentLoop, ToolRules]:
        """The loop, and the rules of its tools.

        Raises:
            ConfigError: A tool of the user's own cannot be imported, or is not one.
        """
        if self.loop == "single_turn":
            return SingleTurn(), ToolRules()
        loop = ToolAgent(
            self.max_turns, self.max_calls, self.max_result_characters, self.cut_results
        )
        tools: dict[str, Tool] = {}
        for name in self.tools:
            tool = TOOLS[name] if name in TOOLS else own_tool(name)
            if tools.setdefault(tool.name, tool) is not tool:
                raise ConfigError(
                    f"two tools are called {tool.name}",
                    where="agent.tools",
                    rule="the model calls a tool by its name",
                    way_out="leave one of them out",
                )
        return loop, ToolRules(tools, self.call_timeout_s, self.tool_exceptions == "show")

    def problems(self) -> Iterable[Problem]:
        for name in self.tools:
            if name not in TOOLS and not is_import_path(name):
                yield Problem(
                    "tools",
                    name,
                    f"there is no such tool; {hint(name, TOOLS)}",
                    "name a known one, or one of your own: module:Name",
                )
        if bool(self.tools) != (self.loop == "tools"):
            yield Problem(
                "tools",
                ", ".join(self.tools) or "none",
                f"does not go with loop {self.loop}",
                "set loop=tools and tools=[calculator], or leave both out",
                reads=("loop",),
            )
