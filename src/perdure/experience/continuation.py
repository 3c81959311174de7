"""Sessions that are not done: what they leave in the log, and where they go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perdure.core.errors import LifecycleError
from perdure.core.experience_records import ToolResult
from perdure.core.ids import PolicyVersion, SessionId
from perdure.core.trajectories import PartialDelta, SessionPrefix
from perdure.experience.appender import Appender
from perdure.experience.groups import GroupTable
from perdure.experience.partials import (
    PartialTokens,
    held_tokens,
    joined_prefix,
    read_tokens,
    says_the_same,
)
from perdure.experience.payloads import PayloadReader, require_numbers
from perdure.experience.unfinished import PartialBatch, Unfinished

MAX_RESULT_CHARACTERS = 2**20
"""Longest result of a tool call; control records are kept for as long as the run."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What an unfinished session has in the log.

    Attributes:
        attempt: How often it has started again.
        tokens: Response tokens of this attempt.
        versions: Lowest and highest policy version of them; None without tokens.
        calls: Tool calls of this attempt whose results are journaled, as ``(turn, call)``.
    """

    attempt: int
    tokens: int
    versions: tuple[PolicyVersion, PolicyVersion] | None
    calls: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, unfinished: Unfinished) -> Begun:
        calls = tuple(unfinished.results)
        return cls(unfinished.attempt, unfinished.tokens, unfinished.versions, calls)


def require_loggable_result(record: ToolResult) -> None:
    """See that the result of a tool call can be logged.

    Raises:
        TypeError, ValueError: A field is not what a record can hold, or the result is too long.
    """
    require_numbers(record.session, (record.attempt, record.turn, record.call))
    for text in (record.tool, record.result, record.arguments):
        if type(text) is not str:
            raise TypeError(f"{text!r} in {record.key()} is not text")
        text.encode()  # lone surrogates cannot be stored
    if len(record.result) > MAX_RESULT_CHARACTERS:
        raise ValueError(
            f"{record.key()} has {len(record.result)} characters; at most"
            f" {MAX_RESULT_CHARACTERS} are kept"
        )


class Continuations:
    """Joins what unfinished sessions have left. Call it with the lock of the appender held."""

    def __init__(self, table: GroupTable, *, appender: Appender, reader: PayloadReader) -> None:
        self._table = table
        self._appender = appender
        self._reader = reader

    def lacking(self, deltas: Iterable[PartialDelta]) -> list[PartialDelta]:
        """What the log does not have yet, of sessions that are not done.

        Raises:
            LifecycleError: A session is unknown, its group is terminal, a piece leaves a gap, is of
                an attempt that was given up, or says something else than the log.
            DamagedError: What the log has cannot be read for the comparison.
        """
        lacking: list[PartialDelta] = []
        for delta in deltas:
            if self._table.is_settled(delta.session):
                continue
            unfinished = self._table.unfinished(delta.session)
            if delta.attempt != unfinished.attempt or delta.start > unfinished.tokens:
                raise _misplaced(delta, unfinished)
            known = min(unfinished.tokens, delta.end)
            if delta.start < known:
                self._compare(delta.between(delta.start, known))
            if known < delta.end:
                lacking.append(delta if delta.start == known else delta.between(known, delta.end))
        return lacking

    def prefixes(self, sessions: Sequence[SessionId]) -> dict[SessionId, SessionPrefix]:
        """What sessions have left, each record read once."""
        self._appender.place_acknowledged()
        wanted = {session: self._table.unfinished(session) for session in sessions}
        rows: dict[int, tuple[PartialBatch, list[int]]] = {}
        for unfinished in wanted.values():
            for batch, row in unfinished.parts:
                rows.setdefault(id(batch), (batch, []))[1].append(row)
        pieces: dict[SessionId, list[PartialDelta]] = {session: [] for session in wanted}
        for batch, some in rows.values():
            tokens = self._tokens(batch)
            for piece in map(tokens.piece, some):
                pieces[piece.session].append(piece)
        return {
            session: joined_prefix(
                session,
                unfinished.attempt,
                sorted(pieces[session], key=lambda piece: piece.start),
            )
            for session, unfinished in wanted.items()
        }

    def _tokens(self, batch: PartialBatch) -> PartialTokens:
        if batch.payload is None:
            return held_tokens(self._appender.partials[batch.record.key()])
        return read_tokens(self._reader, batch)

    def _compare(self, delta: PartialDelta) -> None:
        logged = self.prefixes([delta.session])[delta.session].between(delta.start, delta.end)
        if not says_the_same(delta, logged):
            raise LifecycleError(
                f"tokens {delta.start} to {delta.end} are in the log already and say something"
                " else",
                where=f"session {delta.session.key()}",
                rule="what is durable of a session may be repeated, never replaced",
                way_out="go on from store.prefix, or restart the session",
            )


def _misplaced(delta: PartialDelta, unfinished: Unfinished) -> LifecycleError:
    return LifecycleError(
        f"tokens {delta.start} to {delta.end} of attempt {delta.attempt} where the log has"
        f" {unfinished.tokens} tokens of attempt {unfinished.attempt}",
        where=f"session {delta.session.key()}",
        rule="an attempt goes on behind its last logged token, and the next one begins with a"
        " restart",
        way_out="go on from store.prefix, or restart the session",
    )
