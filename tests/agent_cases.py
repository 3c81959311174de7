"""A runner over a store in memory, whose engine says what a script says; it may be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import experience_records as make
import numpy as np

from perdure.core.agent_api import Arguments, CallKey, ToolKind
from perdure.core.clock import ManualClock
from perdure.core.errors import EngineLostError
from perdure.core.faults import NoFaults
from perdure.core.ids import GroupId, PolicyVersion, SessionId
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationChunk, GenerationRequest
from perdure.core.trajectories import Trajectory
from perdure.experience import (
    ExperienceStore,
    GroupState,
    LogOptions,
    RunInfo,
    claim_experience,
    create_run,
)
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.sessions import SessionRules, SessionRunner
from perdure.storage import CrashMode
from perdure.storage.memory import MemoryStorage
from perdure.tasks.api import Prompt, RewardResult
from perdure.tasks.tokenizer import EOS_ID, ByteTokenizer, Tokenizer

_FIRST_VERSION = PolicyVersion(0)
Policy = Callable[[GenerationRequest, str], str]
"""What is said next in a turn, by the request and all that was said so far."""


def adds(request: GenerationRequest, said: str) -> str:
    """Calls the calculator once, then answers; talks on after the call if nobody stops it."""
    if "</result>" in said:
        return "3\x01"
    return "<tool>calculator(1+2)</tool> and on and on"


@dataclass
class ScriptedEngine:
    """Says what the policy says, some tokens at a time; a NUL-free text, ``\\x01`` is the end.

    Attributes:
        fails: How many tokens it gives before it is lost, for each of its next requests.
        holds: It says no more than so many tokens of a session, and waits for ever.
    """

    tokenizer: Tokenizer
    policy: Policy = adds
    chunk: int = 4
    version: PolicyVersion = _FIRST_VERSION
    fails: list[int] = field(default_factory=list)
    holds: int | None = None
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        self.requests.append(request)
        fails_after = self.fails.pop(0) if self.fails else None
        prefix = list(request.prefix_ids)
        budget = request.sampling.max_new_tokens - len(prefix)
        ids = self._ids(request)[:budget]
        given = 0
        while True:
            await asyncio.sleep(0)
            if self.holds is not None and len(prefix) + given >= self.holds:
                await asyncio.Event().wait()
            if fails_after is not None and given >= fails_after:
                raise EngineLostError("the engine is gone")
            some = ids[given : given + self.chunk]
            stops = [i for i, t in enumerate(some) if t in request.sampling.stop_token_ids]
            some = some[: stops[0] + 1] if stops else some
            given += len(some)
            reason = StopReason.STOP if stops else StopReason.LENGTH if given == budget else None
            yield GenerationChunk(
                np.array(some, np.int32),
                np.full(len(some), -0.5, np.float32),
                self.version,
                reason,
            )
            if reason is not None:
                return

    def _ids(self, request: GenerationRequest) -> list[int]:
        """The rest of the turn."""
        said = self.tokenizer.decode(request.prefix_ids)
        turn = said.rpartition("</result>")[2]
        text = self.policy(request, said)
        assert text.startswith(turn) or not turn, (text, turn)
        body, end, _ = text[len(turn) :].partition("\x01")
        return [*self.tokenizer.encode(body), *([EOS_ID] if end else [])]


class CountingTool:
    """Says ``3``; ``raises`` are what it raises instead, one for each of the next calls."""

    name = "calculator"
    parameters = ("expression",)

    def __init__(self, *raises: BaseException, kind: ToolKind = ToolKind.STATELESS) -> None:
        self.kind = kind
        self.raises = list(raises)
        self.calls: list[CallKey] = []
        self.replayed: list[tuple[CallKey, str]] = []
        self.forgotten: list[SessionId] = []

    async def call(self, key: CallKey, arguments: Arguments) -> str:
        self.calls.append(key)
        await asyncio.sleep(0)
        if self.raises:
            raise self.raises.pop(0)
        return "3"

    async def replay(self, key: CallKey, arguments: Arguments, result: str) -> None:
        self.replayed.append((key, result))

    async def forget(self, session: SessionId) -> None:
        self.forgotten.append(session)


@dataclass
class AnyTask:
    """Finds every answer right."""

    tokenizer: Tokenizer
    slow_verifier: bool = False

    def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        return RewardResult(1.0, {"correct": 1.0})


class Lives:
    """A run of two sessions of one group, over several lives of its process."""

    def __init__(self, rules: SessionRules, tokenizer: Tokenizer | None = None) -> None:
        self.rules = rules
        self.tokenizer = tokenizer or ByteTokenizer()
        self.task = AnyTask(self.tokenizer)
        self.storage = MemoryStorage()
        self.events: list[tuple[str, dict[str, object]]] = []
        create_run(self.storage, RunInfo("5" * 32, 0.0))
        self.store = self._store()
        self.store.submit([make.submitted(0)])
        self.store.flush(1)

    def engine(self, **traits: object) -> ScriptedEngine:
        return ScriptedEngine(self.tokenizer, **traits)  # type: ignore[arg-type]

    def live(self, engine: ScriptedEngine, *, cut_short_after: int | None = None) -> None:
        """Run what is open; with ``cut_short_after`` end it in order after so many turns."""
        asyncio.run(self._live(engine, cut_short_after))

    def lose_power(self) -> None:
        """What was not synced is gone; the next life begins."""
        self.storage = self.storage.crash(CrashMode.NOTHING_KEPT, seed=1)
        self.store = self._store()

    def end_in_order(self) -> None:
        self.store.close("stopped")
        self.store = self._store()

    @property
    def state(self) -> GroupState:
        return self.store.state.table.state_of(GroupId(0))

    @property
    def reason(self) -> str:
        return self.store.state.groups[GroupId(0)].reason

    def trajectories(self) -> list[Trajectory]:
        self.store.flush(1)
        return list(self.store.rewarded_group(GroupId(0)).trajectories)

    async def _live(self, engine: ScriptedEngine, cut_short_after: int | None) -> None:
        parts = RuntimeParts(self.store, self.task, ManualClock(), NoFaults(), self._note)  # type: ignore[arg-type]
        runner = SessionRunner(engine, parts=parts, rules=self.rules)  # type: ignore[arg-type]
        running = asyncio.create_task(runner.run_groups(self.store.open_groups()))
        if cut_short_after is None:
            await running
            return
        for _ in range(cut_short_after):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def _note(self, name: str, fields: dict[str, object]) -> None:
        self.events.append((name, fields))

    def _store(self) -> ExperienceStore:
        return claim_experience(
            self.storage,
            clock=ManualClock(),
            faults=NoFaults(),
            options=LogOptions(threaded=False, tries=1),
            take_over=True,
        ).start()
