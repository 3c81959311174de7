"""Agent loops: one answer, or turns of tool calls and then an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perdure.agents.parsing import parse_calls
from perdure.core.agent_api import (
    CALL_CLOSING,
    RESULT_CLOSING,
    RESULT_OPENING,
    AgentSession,
    ToolCall,
)
from perdure.core.record_types import StopReason

Side = Literal["left", "right", "middle"]


class SingleTurn:
    """One prompt, one answer."""

    async def run(self, session: AgentSession) -> StopReason:
        """See :class:`~perdure.core.agent_api.AgentLoop`."""
        generated = await session.generate()
        assert generated.reason is not None
        return generated.reason


@dataclass(frozen=True, slots=True)
class ToolAgent:
    """The model calls tools, sees what they say, and answers.

    A turn ends with ``</tool>``; the results follow between ``<result>`` and ``</result>``, one
    after another. A turn without a call ends the session.

    Attributes:
        max_turns: Turns of calls; behind them a call is only text.
        max_calls: In one turn; the others are answered with an error.
        max_result_characters: Longer results lose what ``cut`` says.
        cut: Which end of a long result is left out, or its middle.
    """

    max_turns: int = 4
    max_calls: int = 4
    max_result_characters: int = 256
    cut: Side = "right"

    async def run(self, session: AgentSession) -> StopReason:
        """See :class:`~perdure.core.agent_api.AgentLoop`."""
        for turn in range(self.max_turns + 1):
            generated = await session.generate((CALL_CLOSING,) if turn < self.max_turns else ())
            if generated.reason is not None:
                return generated.reason
            calls = parse_calls(session.text(generated.token_ids))
            if not session.remaining_tokens:
                return StopReason.LENGTH
            results = await session.call(self._bounded(calls))
            shown = [shorten(result, self.max_result_characters, self.cut) for result in results]
            session.observe([t for one in shown for t in (RESULT_OPENING, one, RESULT_CLOSING)])
            if not session.remaining_tokens:
                return StopReason.LENGTH
        raise AssertionError("unreachable: the last turn ends with a reason")

    def _bounded(self, calls: list[ToolCall]) -> list[ToolCall]:
        if not calls:
            return [ToolCall("", {}, "nothing opens this call")]
        problem = f"at most {self.max_calls} calls in a turn"
        return [
            call if index < self.max_calls else ToolCall(call.name, {}, problem)
            for index, call in enumerate(calls[: self.max_calls + 1])
        ]


def shorten(text: str, limit: int, cut: Side) -> str:
    """At most ``limit`` characters of a result and a mark where something is missing."""
    if len(text) <= limit:
        return text
    if cut == "left":
        return f"(truncated)...{text[len(text) - limit :]}"
    if cut == "right":
        return f"{text[:limit]}...(truncated)"
    half = limit // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - (limit - half) :]}"
