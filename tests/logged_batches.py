"""What the log has of finished sessions and batches, for tests that lose processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.core.experience_records import SessionsDone
from perdure.core.ids import GroupId, SessionId, UpdateId
from perdure.core.storage_api import Storage
from perdure.core.trajectories import RewardedGroup
from perdure.experience import ExperienceState, read_run
from perdure.experience.claims import highest_incarnation, newest_started
from perdure.experience.payloads import PayloadReader
from perdure.experience.reader import read_lineage


@dataclass
class Acknowledged:
    """What some life was told is durable, or acted upon."""

    sessions: set[SessionId] = field(default_factory=set[SessionId])
    taken: dict[UpdateId, tuple[int, ...]] = field(default_factory=dict[UpdateId, tuple[int, ...]])
    steps: dict[int, str] = field(default_factory=dict[int, str])

    def note(self, state: ExperienceState) -> None:
        for group, live in state.groups.items():
            self.sessions.update(SessionId(group, index) for index in live.rewards)
        self.taken.update({update: record.groups for update, record in state.taken.items()})
        self.steps.update({step: record.digest for step, record in state.step_done.items()})

    def check(self, state: ExperienceState) -> None:
        """Assert that nothing of it is gone or different."""
        for update, groups in self.taken.items():
            assert state.taken[update].groups == groups
        for step, digest in self.steps.items():
            assert state.step_done[step].digest == digest  # type: ignore[index]
        for session in self.sessions:
            assert state.table.is_settled(session), session.key()


Rows = dict[int, tuple[SessionsDone, int]]


def settled_rows(storage: Storage) -> dict[int, Rows]:
    """Group → session index → the first record that settled it, and its row."""
    rows: dict[int, Rows] = {}
    newest = highest_incarnation(storage)
    head = newest_started(storage, run_id=read_run(storage).run_id, below=newest + 1)
    for _, record in read_lineage(storage, head).records:
        if isinstance(record, SessionsDone):
            for row, session in enumerate(record.sessions):
                rows.setdefault(session.group, {}).setdefault(session.index, (record, row))
    return rows


def logged_group(reader: PayloadReader, rows: Rows, group: int) -> RewardedGroup:
    trajectories = []
    rewards = []
    for index, (record, row) in sorted(rows.items()):
        session = SessionId(GroupId(group), index)
        trajectories.append(reader.trajectory(record.payload, row=row, session=session))
        rewards.append(record.rewards[row])
    return RewardedGroup(group, tuple(trajectories), tuple(rewards))
