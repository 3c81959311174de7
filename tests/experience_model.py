"""What a list of experience records means, for tests that compare the store with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.core.experience_records import (
    GroupSettled,
    Partials,
    SessionRestarted,
    SessionsDone,
    Submitted,
    ToolResult,
)
from perdure.core.ids import GroupId, SessionId
from perdure.core.records import (
    Checkpointed,
    Collect,
    ControlRecord,
    Evicted,
    Refilled,
    StepDone,
    Taken,
)

SESSIONS = 2
"""Sessions of every group."""


@dataclass
class Attempt:
    """What a session has left since it last started."""

    number: int = 0
    tokens: int = 0
    results: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass
class Model:
    """What a list of records means, said in the plainest way."""

    state: dict[int, str] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: int = 0
    owed: list[int] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    """Of sessions that are not done, in groups that are not settled."""

    @classmethod
    def of(cls, records: list[ControlRecord]) -> Model:
        model = cls()
        for record in records:
            model.add(record)
        return model

    def add(self, record: ControlRecord) -> None:
        match record:
            case Submitted():
                self.state[record.group], self.done[record.group] = "pending", set()
            case SessionsDone():
                self._add_sessions(record)
            case Partials() | ToolResult() | SessionRestarted():
                self._add_unfinished(record)
            case GroupSettled():
                self.state[record.group] = record.outcome.value
                self._drop(record.group)
            case Taken():
                self.taken[record.update.key()] = record.groups
                self.state |= dict.fromkeys(record.groups, "taken")
            case StepDone():
                self.steps = record.global_step
                self.state = {g: "trained" if s == "taken" else s for g, s in self.state.items()}
            case Evicted():
                self.state[record.group] = "evicted"
                self.owed.append(record.group)
            case Refilled():
                self.owed.remove(record.replaces)
            case Checkpointed() | Collect():
                self._add_checkpoints(record)
            case _:
                raise AssertionError(record)

    def _add_sessions(self, record: SessionsDone) -> None:
        for session in record.sessions:
            self.state[session.group] = "running"
            self.done[session.group].add(session.index)
            self.attempts.pop((session.group, session.index), None)

    def _add_checkpoints(self, record: Checkpointed | Collect) -> None:
        if isinstance(record, Checkpointed):
            self.checkpoints.append(record.directory)
        else:
            self.checkpoints = [c for c in self.checkpoints if c not in record.directories]

    def _add_unfinished(self, record: Partials | ToolResult | SessionRestarted) -> None:
        if isinstance(record, Partials):
            for session, end in zip(record.sessions, record.ends, strict=True):
                self._begin(session).tokens = end
        elif isinstance(record, ToolResult):
            self._begin(record.session).results[record.turn, record.call] = record.result
        else:
            number = self._begin(record.session).number + 1
            self.attempts[record.session.group, record.session.index] = Attempt(number)

    def _begin(self, session: SessionId) -> Attempt:
        self.state[session.group] = "running"
        return self.attempts.setdefault((session.group, session.index), Attempt())

    def _drop(self, group: int) -> None:
        for index in range(SESSIONS):
            self.attempts.pop((group, index), None)

    def attempt(self, session: SessionId) -> Attempt:
        """What a session has left since it last started; not to be changed."""
        return self.attempts.get((session.group, session.index)) or Attempt()

    def unfinished(self) -> list[SessionId]:
        return [
            SessionId(GroupId(group), index)
            for group in self.among("pending", "running")
            for index in range(SESSIONS)
            if index not in self.done[group]
        ]

    def among(self, *states: str) -> list[int]:
        return sorted(group for group, state in self.state.items() if state in states)
