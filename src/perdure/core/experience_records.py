"""The records of experience itself: what was asked and what came of it.

A rewind never makes them void, other than the decisions in :mod:`perdure.core.records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.core.ids import (
    GlobalStep,
    GroupId,
    PayloadRef,
    PolicyVersion,
    SessionId,
)
from perdure.core.record_types import (
    GroupOutcome,
    RecordType,
    StopReason,
)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A prompt group enters the run. The prompt is stored, so the data set is not needed again."""

    type: ClassVar[RecordType] = RecordType.SUBMITTED
    group: GroupId
    submitted_step: GlobalStep
    sessions: int
    prompt_ids: tuple[int, ...]
    task: str
    """Name of the task whose verifier judges the answers."""
    answer: str
    """What the verifier needs, as text (JSON for structured tasks)."""
    dataset_digest: str
    data_index: int
    """Position in the data order; the frontier of these is the data position of the run."""

    def key(self) -> str:
        return f"submitted/{self.group}"


@dataclass(frozen=True, slots=True)
class SessionsDone:
    """Sessions of any groups ended and their rewards are settled; their tokens lie in ``payload``.

    All fields but ``payload`` have one element per *row*. Each row has an idempotency key of its
    own: a row whose session counted before is ignored, the others count.
    """

    type: ClassVar[RecordType] = RecordType.SESSIONS_DONE
    sessions: tuple[SessionId, ...]
    """Each once; at least one."""
    rewards: tuple[float, ...]
    stop_reasons: tuple[StopReason, ...]
    tokens: tuple[int, ...]
    """Numbers of generated tokens."""
    first_versions: tuple[PolicyVersion, ...]
    last_versions: tuple[PolicyVersion, ...]
    parts: tuple[dict[str, float], ...]
    """Named components of the rewards, e.g. ``{"correct": 1.0}``."""
    payload: PayloadRef
    """A record with the same sessions in the same order."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if there is no row or a column has more or fewer."""
        columns = (
            self.rewards,
            self.stop_reasons,
            self.tokens,
            self.first_versions,
            self.last_versions,
            self.parts,
        )
        rows = len(self.sessions)
        if not rows:
            raise ValueError("a record of settled sessions has no row")
        if set(map(len, columns)) != {rows}:
            raise ValueError(f"columns of unequal length beside {rows} sessions")

    def key(self) -> str:
        return f"sessions_done/{self.sessions[0].key()}"

    def part(self, rows: slice) -> SessionsDone:
        """Some of the rows."""
        return SessionsDone(
            self.sessions[rows],
            self.rewards[rows],
            self.stop_reasons[rows],
            self.tokens[rows],
            self.first_versions[rows],
            self.last_versions[rows],
            self.parts[rows],
            self.payload,
        )


@dataclass(frozen=True, slots=True)
class GroupSettled:
    """A group is terminal."""

    type: ClassVar[RecordType] = RecordType.GROUP_SETTLED
    group: GroupId
    outcome: GroupOutcome
    reason: str = ""

    def key(self) -> str:
        return f"group_settled/{self.group}"


@dataclass(frozen=True, slots=True)
class Partials:
    """Some more tokens of unfinished sessions of any groups; they lie in ``payload``.

    Each row follows, without a gap, what its attempt has so far, and has an idempotency key of its
    own: a row that counted before is ignored, the others count.
    """

    type: ClassVar[RecordType] = RecordType.PARTIALS
    sessions: tuple[SessionId, ...]
    """Each once; at least one."""
    attempts: tuple[int, ...]
    """From 0; a restart of the session begins the next."""
    starts: tuple[int, ...]
    """Response token with which each row begins."""
    ends: tuple[int, ...]
    """Token behind the last one of each row; no row is empty."""
    first_versions: tuple[PolicyVersion, ...]
    last_versions: tuple[PolicyVersion, ...]
    payload: PayloadRef
    """A record with the same rows in the same order."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if rows are missing, unequal in number, empty or twice there."""
        columns = (self.attempts, self.starts, self.ends, self.first_versions, self.last_versions)
        rows = len(self.sessions)
        if not rows or any(len(column) != rows for column in columns):
            raise ValueError(f"columns of unequal length beside {rows} sessions")
        if len(set(self.sessions)) < rows:
            raise ValueError("a session has two rows")
        if not all(0 <= start < end for start, end in zip(self.starts, self.ends, strict=True)):
            raise ValueError("a row without tokens")

    def row_keys(self) -> list[str]:
        """The idempotency key of each row."""
        rows = zip(self.sessions, self.attempts, self.starts, strict=True)
        return [f"partial/{session.key()}/{attempt}/{start}" for session, attempt, start in rows]

    def key(self) -> str:
        return f"partials/{self.sessions[0].key()}/{self.attempts[0]}/{self.starts[0]}"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The journaled result of a tool call, written before it is used."""

    type: ClassVar[RecordType] = RecordType.TOOL_RESULT
    session: SessionId
    attempt: int
    turn: int
    call: int
    tool: str
    result: str
    arguments: str = ""
    """What the tool was called with, as text: another call is never taken for this one."""

    def key(self) -> str:
        return f"tool_result/{self.session.key()}/{self.attempt}/{self.turn}/{self.call}"


@dataclass(frozen=True, slots=True)
class SessionRestarted:
    """An unfinished session starts again from its prompt.

    The tokens and tool results of its earlier attempts stay in the log and are not gone on from.
    """

    type: ClassVar[RecordType] = RecordType.SESSION_RESTARTED
    session: SessionId
    attempt: int
    """The one that begins: the last one plus 1."""
    reason: str

    def key(self) -> str:
        return f"session_restarted/{self.session.key()}/{self.attempt}"
