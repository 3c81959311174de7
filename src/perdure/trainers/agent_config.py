"""What happens between a prompt and an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from perdure.agents.loops import Side, SingleTurn, ToolAgent
from perdure.agents.tools import TOOLS
from perdure.config import OPERATIONAL, Problem, Section
from perdure.core.agent_api import AgentLoop
from perdure.core.names import hint
from perdure.runtime.tool_calls import ToolRules


class AgentConfig(Section):
    """The loop that runs each session, and the tools it may call."""

    loop: Literal["single_turn", "tools"] = "single_turn"
    """One answer, or turns of tool calls and then an answer."""
    tools: tuple[str, ...] = ()
    """Names of the tools: calculator, python_expression."""
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
        """The loop, and the rules of its tools."""
        if self.loop == "single_turn":
            return SingleTurn(), ToolRules()
        loop = ToolAgent(
            self.max_turns, self.max_calls, self.max_result_characters, self.cut_results
        )
        tools = {name: TOOLS[name] for name in self.tools}
        return loop, ToolRules(tools, self.call_timeout_s, self.tool_exceptions == "show")

    def problems(self) -> Iterable[Problem]:
        for name in self.tools:
            if name not in TOOLS:
                yield Problem(
                    "tools", name, f"there is no such tool; {hint(name, TOOLS)}", "name a known one"
                )
        if bool(self.tools) != (self.loop == "tools"):
            yield Problem(
                "tools",
                ", ".join(self.tools) or "none",
                f"does not go with loop {self.loop}",
                "set loop=tools and tools=[calculator], or leave both out",
                reads=("loop",),
            )
