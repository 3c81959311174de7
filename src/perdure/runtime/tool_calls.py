"""The tool calls of one run of an agent loop: once made, never made again.

A result is journaled before it is used. When the loop runs again, after a crash or a lost engine,
calls with a journaled result get that one; a tool with a state is told of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast

from perdure.agents.parsing import storable
from perdure.agents.tools import accepted
from perdure.core.agent_api import (
    Arguments,
    CallKey,
    StatefulTool,
    Tool,
    ToolCall,
    ToolError,
    ToolKind,
)
from perdure.core.errors import InfrastructureError
from perdure.core.experience_records import ToolResult
from perdure.core.ids import SessionId

_MAX_JOURNALED = 2**16
"""Characters of a result; the log keeps them for as long as the run."""
_MAX_ARGUMENTS = 2**12

Known = dict[tuple[int, int], ToolResult]
"""Journaled results of an attempt by turn and call."""


class HistoryError(Exception):
    """What a session has does not fit what its loop does now: it starts again from its prompt."""


class SessionFailedError(Exception):
    """The session has failed for a reason that another try would not change."""


class Journal(Protocol):
    """Where results become durable."""

    async def result(self, record: ToolResult) -> None:
        """Returns when it is durable."""
        ...

    async def durable(self) -> None:
        """Returns when the tokens of the session are."""
        ...


class NoJournal:
    """For sessions outside training."""

    async def result(self, record: ToolResult) -> None:
        """See :class:`Journal`."""

    async def durable(self) -> None:
        """See :class:`Journal`."""


@dataclass(frozen=True, slots=True)
class ToolRules:
    """What may be called, and what becomes of calls that fail.

    Attributes:
        tools: By name.
        timeout_s: Longest call.
        show_exceptions: An exception of a tool is told to the model; otherwise it fails the
            session.
    """

    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    timeout_s: float = 30.0
    show_exceptions: bool = False


class SessionCalls:
    """Calls of one run of the loop of a session.

    Args:
        known: What was journaled; new results are added.
    """

    def __init__(
        self,
        session: SessionId,
        attempt: int,
        *,
        rules: ToolRules,
        journal: Journal,
        known: Known,
    ) -> None:
        self._session = session
        self._attempt = attempt
        self._rules = rules
        self._journal = journal
        self._known = known
        self._turn = 0
        self._told: dict[str, StatefulTool] = {}

    async def results(self, calls: Sequence[ToolCall]) -> list[str]:
        """What the calls of the next turn give, in order.

        Raises:
            HistoryError: The journal has another call there, or a tool's state cannot come back.
            InfrastructureError: A tool failed or was too slow.
            SessionFailedError: A tool has a bug.
        """
        turn, self._turn = self._turn, self._turn + 1
        return [
            await self._result(CallKey(self._session, self._attempt, turn, index), call)
            for index, call in enumerate(calls)
        ]

    async def end(self) -> None:
        """Let tools forget the session.

        Raises:
            InfrastructureError, SessionFailedError: As :meth:`results`.
        """
        for tool in self._told.values():
            async with self._guarded(tool):
                await tool.forget(self._session)

    async def _result(self, key: CallKey, call: ToolCall) -> str:
        arguments = _as_text(call.arguments)
        known = self._known.get((key.turn, key.call))
        if known is None:
            result = await self._made(key, call)
            name = storable(call.name)
            known = ToolResult(
                key.session, key.attempt, key.turn, key.call, name, result, arguments
            )
            await self._journal.result(known)
            self._known[key.turn, key.call] = known
        elif (known.tool, known.arguments) != (storable(call.name), arguments):
            raise HistoryError(f"turn {key.turn} calls {call.name!r}, before it was {known.tool!r}")
        else:
            await self._tell(key, call, known.result)
        return known.result

    async def _made(self, key: CallKey, call: ToolCall) -> str:
        try:
            tool, arguments = accepted(call, self._rules.tools)
            if tool.kind is not ToolKind.STATELESS:
                self._told[tool.name] = cast("StatefulTool", tool)
                # The key stands for these tokens: no other ones may come to bear it.
                await self._journal.durable()
            async with self._guarded(tool):
                result = await tool.call(key, arguments)
        except ToolError as error:
            result = f"Error: {error}"
        except SessionFailedError as error:
            if not self._rules.show_exceptions:
                raise
            result = f"Error: {error}"
        return storable(result)[:_MAX_JOURNALED]

    async def _tell(self, key: CallKey, call: ToolCall, result: str) -> None:
        """Bring the state of a tool behind a call that is not made again."""
        try:
            tool, arguments = accepted(call, self._rules.tools)
        except ToolError:
            return
        if tool.kind is ToolKind.RESTART:
            raise HistoryError(f"tool {tool.name} has lost the state of the session")
        if tool.kind is ToolKind.REPLAYABLE:
            stateful = self._told[tool.name] = cast("StatefulTool", tool)
            async with self._guarded(tool):
                await stateful.replay(key, arguments, result)

    @asynccontextmanager
    async def _guarded(self, tool: Tool) -> AsyncGenerator[None]:
        """Sort what a tool raises: the model's fault, what the tool stands on, or a bug."""
        where = f"tool {tool.name}"
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                yield
        except (ToolError, InfrastructureError):
            raise
        except TimeoutError as error:
            what = f"{where} gave no result within {self._rules.timeout_s:g} s"
            raise InfrastructureError(what, where=where) from error
        except OSError as error:
            raise InfrastructureError(f"{where} failed: {error}", where=where) from error
        except Exception as error:
            what = f"{where} raised {type(error).__name__}: {error}"
            raise SessionFailedError(what) from error


def _as_text(arguments: Arguments | str) -> str:
    """What is compared, and shown to people who read the journal."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)
    return storable(text)[:_MAX_ARGUMENTS]
