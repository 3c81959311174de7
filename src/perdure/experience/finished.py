"""Finished sessions as entries of the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from perdure.core.errors import TrainingError
from perdure.core.ids import IncarnationNumber, PayloadRef
from perdure.core.records import SessionsDone
from perdure.core.trajectories import Trajectory
from perdure.experience import entries
from perdure.experience.entries import Entry
from perdure.experience.packed import PackedTrajectories
from perdure.experience.payloads import require_encodable

NOT_PLACED = PayloadRef(IncarnationNumber(0), 0, 0, 0, 0)


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


class PackedSessions(NamedTuple):
    """Sessions as columns; the record's ``payload`` is a placeholder."""

    record: SessionsDone
    trajectories: PackedTrajectories

    def unpacked(self) -> list[FinishedSession]:
        """The same, one by one."""
        return list(
            map(
                FinishedSession,
                self.trajectories.unpacked(),
                self.record.rewards,
                self.record.parts,
            )
        )


def packed_entry(sessions: PackedSessions) -> Entry | None:
    """The sessions as one entry; None if a record cannot hold them."""
    rows = sessions.trajectories
    fits = len(rows) <= entries.MAX_SESSIONS and rows.nbytes <= entries.MAX_BYTES
    return Entry(sessions.record, trajectories=rows) if fits or len(rows) == 1 else None


def require_loggable(session: FinishedSession) -> None:
    """See that a session can be logged.

    Raises:
        TrainingError: The reward is not finite, or the response is empty.
        TypeError, ValueError: An array, a number or a part is not what a record can hold.
    """
    session.trajectory.check()
    for name in session.parts:
        if type(name) is not str:
            raise TypeError(f"a part of a reward is named {name!r}, not by text")
        name.encode()  # lone surrogates cannot be stored
    if not session.trajectory.segments:
        raise TrainingError(
            "the response is empty",
            where=f"session {session.trajectory.session.key()}",
            rule="a session that is done has at least one token, and so a policy version",
            way_out="let the group fail",
        )
    require_encodable(session.trajectory)
    if not math.isfinite(session.reward):
        raise TrainingError(
            f"the reward is {session.reward}",
            where=f"session {session.trajectory.session.key()}",
            rule="a reward is a finite number",
            way_out="repair the reward function, or let the group fail",
        )


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
        parts=tuple([{n: float(v) for n, v in session.parts.items()} for session in sessions]),
        payload=NOT_PLACED,
    )
    return Entry(record, trajectories=trajectories)
