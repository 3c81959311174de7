"""The contracts of agent loops and their tools.

A loop is run again from its beginning after a crash or a lost engine: what its session has already
is given back to it, in order, instead of being generated or called once more. So a loop keeps no
state between runs, and what it does depends on its session alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.core.ids import SessionId
from perdure.core.record_types import StopReason

CALL_OPENING = "<tool>"
CALL_CLOSING = "</tool>"
RESULT_OPENING = "<result>"
RESULT_CLOSING = "</result>"

Arguments = Mapping[str, Any]
"""Values of JSON by parameter."""


class ToolError(Exception):
    """The model used a tool wrongly; the text is what it is told."""


class ToolKind(enum.Enum):
    """What a tool remembers of a session, and how that comes back after a crash.

    Attributes:
        STATELESS: Nothing.
        REPLAYABLE: A state that its calls, made known to it again, rebuild.
        RESTART: A state that cannot be rebuilt: the session starts again from its prompt.
    """

    STATELESS = "stateless"
    REPLAYABLE = "replayable"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class CallKey:
    """Names one call of a run: a tool may use it to do what was asked for only once.

    Attributes:
        attempt: How often the session has started again from its prompt.
        turn: Turns of calls in front of this one.
        call: Calls in front of this one in its turn.
    """

    session: SessionId
    attempt: int
    turn: int
    call: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asks for.

    Attributes:
        arguments: By parameter; as text if it wrote them between parentheses.
        problem: Why this cannot be asked of any tool; empty if it can.
    """

    name: str
    arguments: Arguments | str
    problem: str = ""


class Tool(Protocol):
    """Something a model may call. One object serves all sessions of a process."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Sequence[str]:
        """Names of the arguments; text between parentheses is that of a single one."""
        ...

    @property
    def kind(self) -> ToolKind: ...

    async def call(self, key: CallKey, arguments: Arguments) -> str:
        """The result, as text for the model.

        Raises:
            ToolError: The arguments are wrong; the model is told so.
            InfrastructureError: What the tool stands on failed; the call is made again.
        """
        ...


class StatefulTool(Tool, Protocol):
    """A tool of another kind than ``STATELESS``."""

    async def replay(self, key: CallKey, arguments: Arguments, result: str) -> None:
        """Bring the session's state behind a call whose result is known (``REPLAYABLE``)."""
        ...

    async def forget(self, session: SessionId) -> None:
        """Let go of what is kept for a session: it has ended, or its state is made again."""
        ...


@dataclass(frozen=True, slots=True)
class Generated:
    """What one :meth:`AgentSession.generate` gave.

    Attributes:
        token_ids: Of this turn.
        reason: Why it ended; None if with one of the texts it was to end with.
    """

    token_ids: tuple[int, ...]
    reason: StopReason | None


class AgentSession(Protocol):
    """One run of a loop, as the loop sees it."""

    @property
    def remaining_tokens(self) -> int:
        """Budget that is left."""
        ...

    async def generate(self, until: Sequence[str] = ()) -> Generated:
        """Generate until a stop token, the end of the budget, or the end of one of these texts."""
        ...

    async def call(self, calls: Sequence[ToolCall]) -> list[str]:
        """Make the calls of one turn; their results, in order, are in the log when they return."""
        ...

    def observe(self, parts: Sequence[str]) -> None:
        """Put text in that the policy did not choose; cut where the budget ends.

        Of a part that has no tokens as a whole, the characters that have some are put in.
        """
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """What these tokens say."""
        ...


class AgentLoop(Protocol):
    """From a prompt to the end of a session."""

    async def run(self, session: AgentSession) -> StopReason:
        """Run to the end; returns why the session ended: ``STOP`` or ``LENGTH``."""
        ...
