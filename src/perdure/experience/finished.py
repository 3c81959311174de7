"""Finished sessions as entries of the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from perdure.core.ids import IncarnationNumber, PayloadRef
from perdure.core.records import SessionsDone
from perdure.core.trajectories import Trajectory
from perdure.experience import entries
from perdure.experience.entries import Entry

_NOT_PLACED = PayloadRef(IncarnationNumber(0), 0, 0, 0, 0)


class FinishedSession(NamedTuple):
    """A session to log.

    Attributes:
        trajectory: Must not change afterwards.
        reward: Finite.
        parts: Named components of the reward.
    """

    trajectory: Trajectory
    reward: float
    parts: Mapping[str, float]


def session_entries(sessions: Iterable[FinishedSession]) -> list[Entry]:
    """Entries with the sessions in order, none above the limits of a record."""
    return [_entry(some) for some in _portions(sessions)]


def _portions(sessions: Iterable[FinishedSession]) -> Iterator[list[FinishedSession]]:
    some: list[FinishedSession] = []
    size = 0
    for session in sessions:
        more = session.trajectory.nbytes
        if some and (size + more > entries.MAX_BYTES or len(some) == entries.MAX_SESSIONS):
            yield some
            some, size = [], 0
        some.append(session)
        size += more
    if some:
        yield some


def _entry(sessions: Sequence[FinishedSession]) -> Entry:
    trajectories = [session.trajectory for session in sessions]
    versions = [t.version_range() for t in trajectories]
    record = SessionsDone(
        sessions=tuple([t.session for t in trajectories]),
        rewards=tuple([float(session.reward) for session in sessions]),
        stop_reasons=tuple([t.stop_reason for t in trajectories]),
        tokens=tuple([int(np.count_nonzero(t.loss_mask_T.view(np.bool_))) for t in trajectories]),
        first_versions=tuple([first for first, _ in versions]),
        last_versions=tuple([last for _, last in versions]),
        parts=tuple([dict(session.parts) for session in sessions]),
        payload=_NOT_PLACED,
    )
    return Entry(record, trajectories=trajectories)
