"""Trajectories that came as the columns of a record, taken apart only when they are read."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.core.ids import SessionId
from perdure.core.trajectories import Array, Trajectory
from perdure.experience.columns import ARRAYS, TrajectoryColumns
from perdure.experience.payloads import trajectory_in_row


class PackedTrajectories:
    """The rows of columns whose arrays are in one piece each.

    There is no object for a row: of what lives for long, the garbage collector looks at every one.

    Attributes:
        columns: Checked: lengths agree, and the segments cover each response.
        sessions: Of the rows; each once.
    """

    __slots__ = ("_rows", "columns", "nbytes", "sessions")

    def __init__(self, columns: TrajectoryColumns, sessions: Sequence[SessionId]) -> None:
        self.columns = columns
        self.sessions = sessions
        self.nbytes = sum([pieces[0].nbytes for pieces in columns.arrays.values()])
        self._rows: dict[SessionId, int] = {}

    def __len__(self) -> int:
        return len(self.sessions)

    def part(self, rows: slice) -> PackedTrajectories:
        """Some of the rows; their arrays are views."""
        fields, arrays = self.columns
        cut: dict[str, tuple[Array]] = {}
        for name, (_, lengths) in ARRAYS.items():
            start = sum(fields[lengths][: rows.start])
            end = start + sum(fields[lengths][rows])
            cut[name] = (arrays[name][0][start:end],)
        some = TrajectoryColumns({name: column[rows] for name, column in fields.items()}, cut)
        return PackedTrajectories(some, self.sessions[rows])

    def trajectory(self, session: SessionId) -> Trajectory:
        """One of them; its arrays are views."""
        return self._in_row(self._row(session))

    def nbytes_of(self, session: SessionId) -> int:
        """Bytes of the arrays of one of them."""
        row, (fields, arrays) = self._row(session), self.columns
        prompt, response = fields["prompt_tokens"][row], fields["response_tokens"][row]
        sizes = {name: pieces[0].itemsize for name, pieces in arrays.items()}
        return prompt * sizes.pop("prompt_ids") + response * sum(sizes.values())

    def unpacked(self) -> list[Trajectory]:
        """All of them."""
        return [self._in_row(row) for row in range(len(self.sessions))]

    def _row(self, session: SessionId) -> int:
        if not self._rows:
            self._rows = {session: row for row, session in enumerate(self.sessions)}
        return self._rows[session]

    def _in_row(self, row: int) -> Trajectory:
        fields, arrays = self.columns
        starts = (sum(fields["prompt_tokens"][:row]), sum(fields["response_tokens"][:row]))
        whole = {name: pieces[0] for name, pieces in arrays.items()}
        return trajectory_in_row(fields, whole, row, starts=starts)
