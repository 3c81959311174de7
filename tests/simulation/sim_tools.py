"""Agent loops and tools of the simulation, and what the world outside a run remembers of calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from mischief import (
    CALL_FAILED,
    CALL_HUNG,
    CALL_INTERRUPTED,
    CALL_RAISED,
    CALL_REPEATED,
    Witness,
)

from perdure.core.agent_api import (
    AgentSession,
    Arguments,
    CallKey,
    ToolCall,
    ToolError,
    ToolKind,
)
from perdure.core.errors import InfrastructureError
from perdure.core.ids import SessionId
from perdure.core.keyed_random import generator
from perdure.core.record_types import StopReason
from perdure.runtime.sessions import SessionRules
from perdure.runtime.tool_calls import ToolRules

TURNS = 3
_ENDS_TURN = ("0", "1")
"""Of the seven digits that the fake engine says."""
_HANGS_S = 1e4


class CallingLoop:
    """Up to ``TURNS`` turns of one or two calls; what is asked for depends on what was said."""

    async def run(self, session: AgentSession) -> StopReason:
        said, made = "", 0
        for _ in range(TURNS):
            generated = await session.generate(_ENDS_TURN)
            if generated.reason is not None:
                return generated.reason
            if not session.remaining_tokens:
                return StopReason.LENGTH
            said += session.text(generated.token_ids)
            calls = _calls(said, made)
            results = await session.call(calls)
            made += sum(call.name == OutsideTool.name for call in calls)
            said += "".join(results)
            session.observe(results)
            if not session.remaining_tokens:
                return StopReason.LENGTH
        generated = await session.generate()
        assert generated.reason is not None
        return generated.reason


def _calls(said: str, made: int) -> list[ToolCall]:
    """One call, or two; of two, the first may be of a tool that does not exist."""
    if said.endswith("0"):
        return [ToolCall(OutsideTool.name, {"of": said, "behind": made})]
    known = len(said) % 4 > 0
    first = ToolCall(OutsideTool.name if known else "nobody", {"of": said, "behind": made})
    return [first, ToolCall(OutsideTool.name, {"of": f"{said}=", "behind": made + known})]


class Outside:
    """What tools have done, which no crash takes back.

    Args:
        is_journaled: Whether the log has acknowledged the result of a call.
        witness: Is told of what becomes of calls, and of those that must not be made.

    Attributes:
        begun: Calls so far, by their keys.
    """

    def __init__(self, is_journaled: Callable[[CallKey], bool], witness: Witness) -> None:
        self.begun = Counter[CallKey]()
        self.witness = witness
        self._is_journaled = is_journaled
        self._asked: dict[CallKey, str] = {}
        self._returned: set[CallKey] = set()

    def new_life(self) -> None:
        """The process that made the calls is gone."""
        self._returned.clear()

    def begin(self, key: CallKey, asked: str, *, stateless: bool) -> int:
        """A call is made; returns how often it was made before."""
        require = self.witness.require
        require(not self._is_journaled(key), f"{key} is in the journal and made again")
        require(key not in self._returned, f"{key} has given its result to this process")
        before = asked if stateless else self._asked.setdefault(key, asked)
        require(before == asked, f"{key} stood for {before!r}, now for {asked!r}")
        if self.begun[key]:
            self.witness.seen[CALL_REPEATED] += 1
        self.begun[key] += 1
        return self.begun[key] - 1

    def returned(self, key: CallKey) -> None:
        """The call has given a result."""
        self._returned.add(key)


@dataclass
class OutsideTool:
    """A tool that takes its time, and fails in every way that a tool may.

    Its results say how often the call was made: who makes one again gets another result.

    Attributes:
        state: Calls that the tool knows of, by session; gone with the process.
    """

    outside: Outside
    rng: np.random.Generator
    kind: ToolKind
    state: dict[SessionId, list[CallKey]]
    name = "outside"
    parameters = ("of", "behind")

    async def call(self, key: CallKey, arguments: Arguments) -> str:
        stateless = self.kind is ToolKind.STATELESS
        again = self.outside.begin(key, arguments["of"], stateless=stateless)
        if not stateless:
            self._enter(key, arguments)
        await self._take_time()
        result = self._answer(key, again)
        self.outside.returned(key)
        if len(result) > 3:
            raise ToolError(result)
        return result

    async def replay(self, key: CallKey, arguments: Arguments, result: str) -> None:
        self._enter(key, arguments)

    async def forget(self, session: SessionId) -> None:
        self.state.pop(session, None)

    def _enter(self, key: CallKey, arguments: Arguments) -> None:
        """The state is behind all earlier calls of the attempt, and of no other one."""
        known = self.state.setdefault(key.session, [])
        same = all(replace(one, turn=key.turn, call=key.call) == key for one in known)
        follows = not known or (known[-1].turn, known[-1].call) < (key.turn, key.call)
        right = same and follows and len(known) == arguments["behind"]
        self.outside.witness.require(right, f"{key} with {arguments} was made behind {known}")
        known.append(key)

    async def _take_time(self) -> None:
        trouble, seen = self.rng.random(), self.outside.witness.seen
        if trouble < 0.02:
            seen[CALL_HUNG] += 1
            await asyncio.sleep(_HANGS_S)
        try:
            await asyncio.sleep(float(self.rng.pareto(1.5)) if trouble < 0.7 else 0.0)
        except asyncio.CancelledError:
            seen[CALL_INTERRUPTED] += 1
            raise
        if trouble < 0.08:
            seen[CALL_FAILED] += 1
        if trouble < 0.05:
            raise InfrastructureError("the service is away", where="simulation")
        if trouble < 0.08:
            raise ConnectionResetError(104, "Connection reset by peer")
        if trouble < 0.085:
            seen[CALL_RAISED] += 1
            raise RuntimeError("a bug of the tool")

    def _answer(self, key: CallKey, again: int) -> str:
        rng = generator(
            again, "answer", key.session.group, key.session.index, key.attempt, key.turn, key.call
        )
        digits = "".join(map(str, rng.integers(7, 10, int(rng.integers(1, 4)))))
        return digits if rng.random() < 0.9 else f"what is {digits}"


def with_tools(
    rules: SessionRules, outside: Outside, *, rng: np.random.Generator, kind: ToolKind
) -> SessionRules:
    """The same rules, with sessions that call."""
    tool = OutsideTool(outside, rng, kind, {})
    return replace(rules, loop=CallingLoop(), tools=ToolRules({tool.name: tool}))
