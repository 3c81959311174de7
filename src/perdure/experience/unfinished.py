"""What a session that is not done has left in the log: tokens, tool results, restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from perdure.core.errors import LifecycleError
from perdure.core.experience_records import (
    Partials,
    SessionRestarted,
    ToolResult,
)
from perdure.core.ids import PayloadRef, PolicyVersion, SessionId


@dataclass(slots=True)
class PartialBatch:
    """A record of partial tokens; ``payload`` is None while it is not durable."""

    record: Partials
    payload: PayloadRef | None


class PartialPart(NamedTuple):
    """A row of a record: a piece of one session."""

    batch: PartialBatch
    row: int

    @property
    def start(self) -> int:
        return self.batch.record.starts[self.row]

    @property
    def end(self) -> int:
        return self.batch.record.ends[self.row]


@dataclass(slots=True)
class Unfinished:
    """The newest attempt of a session; those before it are not gone on from.

    Attributes:
        tokens: Response tokens that the log has.
        parts: Where they lie, in order.
        results: Journaled results by ``(turn, call)``.
    """

    attempt: int = 0
    tokens: int = 0
    parts: list[PartialPart] = field(default_factory=list[PartialPart])
    results: dict[tuple[int, int], ToolResult] = field(
        default_factory=dict[tuple[int, int], ToolResult]
    )

    @property
    def versions(self) -> tuple[PolicyVersion, PolicyVersion] | None:
        """Lowest and highest policy version of its tokens; None without tokens."""
        if not self.parts:
            return None
        return (
            min([part.batch.record.first_versions[part.row] for part in self.parts]),
            max([part.batch.record.last_versions[part.row] for part in self.parts]),
        )

    def lacks(self, record: Partials, row: int) -> bool:
        """Whether a row is new here.

        Raises:
            LifecycleError: It neither follows the last token nor lies before it.
        """
        attempt, start, end = record.attempts[row], record.starts[row], record.ends[row]
        if attempt < self.attempt or (attempt == self.attempt and end <= self.tokens):
            return False
        if attempt > self.attempt or start != self.tokens:
            raise _illegal(
                record.sessions[row],
                f"tokens {start} to {end} of attempt {attempt} follow token {self.tokens} of"
                f" attempt {self.attempt}",
            )
        return True

    def extend(self, batch: PartialBatch, row: int) -> None:
        """Count a row that :meth:`lacks` has let in."""
        part = PartialPart(batch, row)
        self.parts.append(part)
        self.tokens = part.end

    def require_attempt(self, record: ToolResult) -> None:
        """Raises ``LifecycleError`` for a result that is not of this attempt."""
        if record.attempt != self.attempt:
            raise _illegal(
                record.session,
                f"a tool result of attempt {record.attempt} in attempt {self.attempt}",
            )

    def require_next(self, record: SessionRestarted) -> None:
        """Raises ``LifecycleError`` for a restart that is not the next one."""
        if record.attempt != self.attempt + 1:
            raise _illegal(
                record.session, f"attempt {record.attempt} follows attempt {self.attempt}"
            )

    def restart(self) -> None:
        """Begin the next attempt, from the prompt."""
        self.attempt += 1
        self.tokens = 0
        self.parts.clear()
        self.results.clear()

    def check(self) -> None:
        """Assert that the parts follow one another."""
        end = 0
        for part in self.parts:
            assert part.start == end
            assert part.batch.record.attempts[part.row] == self.attempt
            end = part.end
        assert end == self.tokens
        assert all(result.attempt == self.attempt for result in self.results.values())


def _illegal(session: SessionId, what: str) -> LifecycleError:
    return LifecycleError(
        what,
        where=f"session {session.key()}",
        rule="an attempt goes on behind its last logged token, and the next one begins with a"
        " restart",
        way_out="go on from store.prefix, or restart the session",
    )
