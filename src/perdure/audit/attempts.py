"""What sessions leave before their end, and that each goes on from it or says that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perdure.audit.history import Event
from perdure.audit.partials import PartialTokens
from perdure.audit.report import Findings
from perdure.audit.schema import session_key
from perdure.audit.trajectories import Trajectories

CONTINUE_RULE = "an attempt goes on behind its last logged token, and a restart begins the next one"
PREFIX_RULE = "a trajectory begins with what its session's last attempt left in the log"
JOURNAL_RULE = (
    "tokens that the policy did not generate come from results that were journaled before"
)

_ARRAYS = {"token_ids": "response_ids", "logprobs": "logprobs", "loss_mask": "loss_mask"}
"""Array of partial tokens → array of a trajectory."""


@dataclass(slots=True)
class Attempt:
    """The newest attempt of a session that is not done.

    Attributes:
        end: Tokens that were logged.
        pieces: Their arrays by name, and ``(version, start, end)``; None if some cannot be read.
        turns: Those with a journaled result.
    """

    number: int = 0
    end: int = 0
    pieces: dict[str, bytes] | None = field(default_factory=lambda: dict.fromkeys(_ARRAYS, b""))
    segments: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    turns: set[int] = field(default_factory=set[int])


class Attempts:
    """Follows the sessions that are not done, record by record."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._open: dict[int, dict[int, Attempt]] = {}
        """By group and index."""
        self.partial_tokens = 0
        self.tool_results = 0
        self.restarts = 0

    def partials(self, event: Event, tokens: PartialTokens | None) -> None:
        """Sessions left some more tokens; ``tokens`` is None if they cannot be read."""
        fields = event.fields
        for row in event.rows:
            attempt = self._of(fields["sessions"][row])
            number, start, end = (fields[name][row] for name in ("attempts", "starts", "ends"))
            if (number, start) != (attempt.number, attempt.end):
                self._violation(
                    event,
                    fields["sessions"][row],
                    f"token {start} of attempt {number} follows token {attempt.end} of attempt"
                    f" {attempt.number}",
                    CONTINUE_RULE,
                )
            attempt.number, attempt.end = number, end
            self.partial_tokens += end - start
            if tokens is None or attempt.pieces is None:
                attempt.pieces = None
                continue
            for name in _ARRAYS:
                attempt.pieces[name] += tokens.piece(row, name)
            attempt.segments += map(tuple, tokens.fields["segments"][row])
            self._check_journal(event, row, attempt.pieces["loss_mask"])

    def tool_result(self, event: Event) -> None:
        """The result of a tool call is journaled."""
        self.tool_results += 1
        session, number = event.fields["session"], event.fields["attempt"]
        attempt = self._of(session)
        if number != attempt.number:
            what = f"a tool result of attempt {number} in attempt {attempt.number}"
            self._violation(event, session, what, CONTINUE_RULE)
        attempt.turns.add(event.fields["turn"])

    def restarted(self, event: Event) -> None:
        """A session starts again from its prompt."""
        self.restarts += 1
        session, number = event.fields["session"], event.fields["attempt"]
        before = self._of(session).number
        if number != before + 1:
            what = f"attempt {number} follows attempt {before}"
            self._violation(event, session, what, CONTINUE_RULE)
        self._open[session[0]][session[1]] = Attempt(number)

    def done(self, event: Event, trajectories: Trajectories | None) -> None:
        """Sessions ended; ``trajectories`` is None if they cannot be read."""
        for row in event.rows:
            if trajectories is not None:
                self._check_journal(event, row, trajectories.response(row, "loss_mask"))
                self._check_prefix(event, row, trajectories)
            group, index = event.fields["sessions"][row]
            self._open.get(group, {}).pop(index, None)

    def group_ended(self, group: int) -> None:
        """Nobody goes on with the sessions of a group."""
        self._open.pop(group, None)

    def _of(self, session: Sequence[int]) -> Attempt:
        return self._open.setdefault(session[0], {}).setdefault(session[1], Attempt())

    def _check_journal(self, event: Event, row: int, mask: bytes | memoryview) -> None:
        """Each run of tokens that are not the policy's needs a turn with a result."""
        mask_T = np.frombuffer(mask, "|u1")
        if mask_T.all():
            return
        session = event.fields["sessions"][row]
        foreign_T = mask_T == 0
        runs = int(foreign_T[0]) + int(np.count_nonzero(foreign_T[1:] & ~foreign_T[:-1]))
        turns = len(self._of(session).turns)
        if runs > turns:
            what = f"{runs} pieces that the policy did not generate, {turns} turns with a result"
            self._violation(event, session, what, JOURNAL_RULE)

    def _check_prefix(self, event: Event, row: int, trajectories: Trajectories) -> None:
        session = event.fields["sessions"][row]
        attempt = self._open.get(session[0], {}).get(session[1])
        if attempt is None or attempt.pieces is None:
            return
        for name, there in _ARRAYS.items():
            left = attempt.pieces[name]
            if trajectories.response(row, there)[: len(left)] != left:
                what = f"its array {there} does not begin with the {attempt.end} logged tokens"
                self._violation(event, session, what, PREFIX_RULE)
                return
        segments = trajectories.fields["segments"][row]
        clipped = [(v, s, min(e, attempt.end)) for v, s, e in segments if s < attempt.end]
        if _joined(clipped) != _joined(attempt.segments):
            what = f"its versions do not begin with those of the {attempt.end} logged tokens"
            self._violation(event, session, what, PREFIX_RULE)

    def _violation(self, event: Event, session: Sequence[int], what: str, rule: str) -> None:
        self._findings.violation(event.where, f"{session_key(session)}: {what}", rule)


def _joined(segments: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Version and end of each run of one version."""
    joined: list[tuple[int, int]] = []
    for version, _, end in segments:
        if joined and joined[-1][0] == version:
            joined.pop()
        joined.append((version, end))
    return joined
