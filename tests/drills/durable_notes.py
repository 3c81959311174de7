"""What processes that may be killed have said of unfinished sessions, and later ones have found.

Lines are ``durable tokens SESSION ATTEMPT TOKENS`` and ``durable result SESSION ATTEMPT TURN``, the
same with ``found``, and ``found done SESSION``.
"""

from __future__ import annotations


class Durable:
    """What processes said that is durable, and is to be found by the next one."""

    def __init__(self) -> None:
        self.tokens: dict[str, tuple[int, int]] = {}
        self.results: set[str] = set()
        self.done: set[str] = set()

    def note(self, lines: list[str]) -> None:
        for kind, what, session, *rest in (line.split() for line in lines if line.count(" ") > 1):
            if what == "tokens":
                attempt, tokens = map(int, rest)
                self.tokens[session] = max(self.tokens.get(session, (0, 0)), (attempt, tokens))
            elif what == "result":
                self.results.add(" ".join((session, *rest)))
            else:
                assert kind == "found"
                self.done.add(session)

    def check(self, found: Durable) -> None:
        """All of this is in what another process found."""
        for session, place in self.tokens.items():
            assert session in found.done or found.tokens[session] >= place
        for result in self.results:
            session, attempt, _ = result.split()
            superseded = found.tokens.get(session, (0, 0))[0] > int(attempt)
            assert session in found.done or superseded or result in found.results
