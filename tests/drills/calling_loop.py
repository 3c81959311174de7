"""An agent loop that calls a tool whatever the model says, and a count of all calls in a file."""

from __future__ import annotations

import asyncio
import os

from perdure.agents.tools import TOOLS
from perdure.core.agent_api import AgentLoop, AgentSession, Arguments, CallKey, ToolCall, ToolKind
from perdure.core.record_types import StopReason
from perdure.runtime.tool_calls import ToolRules
from perdure.trainers.agent_config import AgentConfig


class CallingLoop:
    """Up to three turns that end with one of some digits, each with a call of the calculator."""

    async def run(self, session: AgentSession) -> StopReason:
        for turn in range(3):
            generated = await session.generate(("1", "2", "3", "4"))
            if not session.remaining_tokens:
                return StopReason.LENGTH
            expression = f"{len(generated.token_ids)}+{turn}"
            session.observe(await session.call([ToolCall("calculator", expression)]))
            if not session.remaining_tokens:
                return StopReason.LENGTH
        generated = await session.generate()
        assert generated.reason is not None
        return generated.reason


class CountedTool:
    """The calculator; each call leaves a line that survives the process."""

    name = "calculator"
    parameters = ("expression",)
    kind = ToolKind.STATELESS

    def __init__(self, counts: str) -> None:
        self._file = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def call(self, key: CallKey, arguments: Arguments) -> str:
        line = f"{key.session.key()} {key.attempt} {key.turn} {key.call}\n"
        os.write(self._file, line.encode())
        await asyncio.sleep(0.001)
        return await TOOLS["calculator"].call(key, arguments)


def install(counts: str) -> None:
    """Have every configuration of this process build this loop and this tool."""

    def build(self: AgentConfig) -> tuple[AgentLoop, ToolRules]:
        return CallingLoop(), ToolRules({"calculator": CountedTool(counts)})

    AgentConfig.build = build  # type: ignore[method-assign]
