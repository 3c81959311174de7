"""What changed since a consumer looked last, at a cost that does not grow with the run."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from perdure.core.ids import GroupId
from perdure.experience.lifecycle import GroupState


class GroupChanges(NamedTuple):
    """The answer to "what changed since?".

    Attributes:
        cursor: Ask with it the next time.
        states: State now, of the groups whose state changed, in the order of their newest change.
        complete: False: so much has changed that some of it is forgotten, and ``states`` has every
            group that is not retired instead.
    """

    cursor: int
    states: dict[GroupId, GroupState]
    complete: bool


class ChangeFeed:
    """Groups in the order in which their states changed; keeps the newest ``limit`` changes."""

    def __init__(self, limit: int = 2**16) -> None:
        self._newest: deque[GroupId] = deque(maxlen=limit)
        self.cursor = 0
        """Number of changes so far."""

    def add(self, group: GroupId) -> None:
        self._newest.append(group)
        self.cursor += 1

    def since(self, cursor: int) -> list[GroupId] | None:
        """Groups that changed after ``cursor``, each once, newest change last; None: forgotten."""
        count = self.cursor - cursor
        if count > len(self._newest):
            return None
        newest_first = dict.fromkeys(islice(reversed(self._newest), max(count, 0)))
        return list(newest_first)[::-1]
