"""Finished sessions to log entries, many sessions to an entry.

What a record costs is paid once per entry; a session adds a row to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from perdure.core.ids import IncarnationNumber, PayloadRef
from perdure.core.records import SessionsDone
from perdure.core.trajectories import Trajectory
from perdure.experience.entries import Entry
from perdure.experience.payloads import trajectories_payload

MAX_SESSIONS = 1024
"""Sessions in one record, at most."""
MAX_BYTES = 4 * 2**20
"""Bytes of arrays in one record of more than one session, at most."""
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


def session_entries(
    sessions: Iterable[FinishedSession],
) -> list[tuple[Entry, Sequence[Trajectory]]]:
    """Entries with the sessions in order, each beside the trajectories it carries.

    Raises:
        TypeError: An array is not of the type that the format gives it.
    """
    return [_entry(some) for some in _portions(sessions)]


def _portions(sessions: Iterable[FinishedSession]) -> Iterator[list[FinishedSession]]:
    some: list[FinishedSession] = []
    size = 0
    for session in sessions:
        more = session.trajectory.nbytes
        if some and (size + more > MAX_BYTES or len(some) == MAX_SESSIONS):
            yield some
            some, size = [], 0
        some.append(session)
        size += more
    if some:
        yield some


def _entry(sessions: Sequence[FinishedSession]) -> tuple[Entry, Sequence[Trajectory]]:
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
    return Entry(record, trajectories_payload(trajectories)), trajectories
