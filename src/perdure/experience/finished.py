"""Finished sessions as entries of the log."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from perdure.core.errors import TrainingError
from perdure.core.experience_records import SessionsDone
from perdure.core.ids import IncarnationNumber, PayloadRef, PolicyVersion
from perdure.core.trajectories import Array, Trajectory
from perdure.experience import entries
from perdure.experience.columns import (
    LooseTrajectories,
    checked_columns,
    row_ends,
)
from perdure.experience.entries import Entry
from perdure.experience.format import joined
from perdure.experience.packed import PackedTrajectories
from perdure.experience.payloads import require_encodable

_Rows = TypeVar("_Rows", LooseTrajectories, PackedTrajectories)
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


class PackedSessions(NamedTuple, Generic[_Rows]):
    """Sessions as columns; the record's ``payload`` is a placeholder."""

    record: SessionsDone
    trajectories: _Rows

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


def pack_sessions(sessions: Sequence[FinishedSession]) -> PackedSessions[LooseTrajectories]:
    """Sessions, of which there are some, as columns. The arrays are not copied.

    Raises:
        TrainingError, TypeError, ValueError: As :func:`require_loggable`.
    """
    try:
        packed, well = _pack(sessions)
        if well:
            return packed
    except (AttributeError, LookupError, TypeError, ValueError):
        # Said better below, by what looks at one session after the other.
        pass
    for session in sessions:
        require_loggable(session)
    packed, _ = _pack(sessions)
    return packed


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


def session_entries(
    sessions: PackedSessions[LooseTrajectories] | PackedSessions[PackedTrajectories],
) -> list[Entry]:
    """Entries with the sessions in order, none above the limits of a record."""
    record, rows = sessions
    if len(rows) <= entries.MAX_SESSIONS and rows.nbytes <= entries.MAX_BYTES:
        return [Entry(record, trajectories=rows)]
    portions = _portions(rows.columns.fields)
    return [Entry(record.part(some), trajectories=rows.part(some)) for some in portions]


def _portions(fields: Mapping[str, Sequence[int]]) -> Iterator[slice]:
    """Rows that a record can hold, neighbours together."""
    ends = row_ends(fields)
    start = before = 0
    while start < len(ends):
        # At least one row, however large it is.
        fitting = bisect_right(ends, before + entries.MAX_BYTES, start + 1)
        end = min(fitting, start + entries.MAX_SESSIONS)
        yield slice(start, end)
        start, before = end, ends[end - 1]


def _pack(
    sessions: Sequence[FinishedSession],
) -> tuple[PackedSessions[LooseTrajectories], bool]:
    """Sessions as columns, and whether :func:`require_loggable` would pass them for certain."""
    trajectories, rewards, parts = zip(*sessions, strict=True)
    columns, well = checked_columns(trajectories)
    fields, arrays = columns
    lowest, highest = _versions(fields["segments"])
    record = SessionsDone(
        sessions=tuple([one.session for one in trajectories]),
        rewards=tuple(map(float, rewards)),
        stop_reasons=tuple([one.stop_reason for one in trajectories]),
        tokens=tuple(generated_tokens(arrays["loss_mask"], fields["response_tokens"])),
        first_versions=lowest,
        last_versions=highest,
        parts=_parts(parts),
        payload=NOT_PLACED,
    )
    "".join(set(chain.from_iterable(parts))).encode()  # raises what suits
    well = well and all(map(math.isfinite, rewards))
    return PackedSessions(record, LooseTrajectories(trajectories, columns)), well


def _parts(parts: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], ...]:
    """Copies; numbers of any kind become plain ones."""
    copies: list[dict[str, float]] = []
    for one in parts:
        copies.append(copy := {**one})
        for name, value in copy.items():
            if type(value) is not float:
                copy[name] = float(value)
    return tuple(copies)


_Versions = tuple[PolicyVersion, ...]


def _versions(segments: Sequence[Any]) -> tuple[_Versions, _Versions]:
    """Lowest and highest version of each row."""
    if set(map(len, segments)) == {1}:
        versions = tuple([version for ((version, _, _),) in segments])
        return versions, versions
    every = [[version for version, _, _ in some] for some in segments]
    return tuple(map(min, every)), tuple(map(max, every))


def generated_tokens(masks: Sequence[Array], lengths: Sequence[int]) -> Sequence[int]:
    """How many tokens of each row, so many in all, are the policy's own. Masks in any pieces."""
    if joined(masks) == bytearray(b"\1") * sum(lengths):
        return lengths
    flags = np.concatenate(masks).view(np.bool_)
    ends = list(accumulate(lengths, initial=0))
    return [int(np.count_nonzero(flags[start:end])) for start, end in pairwise(ends)]
