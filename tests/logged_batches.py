"""What the log has of finished sessions and batches, for tests that lose processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.core.agent_api import CallKey
from perdure.core.experience_records import SessionsDone, ToolResult
from perdure.core.ids import GroupId, SessionId, UpdateId
from perdure.core.storage_api import Storage
from perdure.core.trajectories import RewardedGroup
from perdure.experience import ExperienceState, read_run
from perdure.experience.claims import highest_incarnation, newest_started
from perdure.experience.lifecycle import OPEN
from perdure.experience.payloads import PayloadReader
from perdure.experience.reader import read_lineage
from perdure.experience.unfinished import Unfinished


@dataclass
class Acknowledged:
    """What some life was told is durable, or acted upon."""

    sessions: set[SessionId] = field(default_factory=set[SessionId])
    taken: dict[UpdateId, tuple[int, ...]] = field(default_factory=dict[UpdateId, tuple[int, ...]])
    steps: dict[int, str] = field(default_factory=dict[int, str])
    begun: dict[SessionId, tuple[int, int]] = field(
        default_factory=dict[SessionId, tuple[int, int]]
    )
    """Attempt and tokens of unfinished sessions."""
    results: dict[CallKey, ToolResult] = field(default_factory=dict[CallKey, ToolResult])
    _closed: set[GroupId] = field(default_factory=set[GroupId])

    def note(self, state: ExperienceState) -> None:
        for group, live in state.groups.items():
            if group in self._closed:
                continue
            self.sessions.update(SessionId(group, index) for index in live.rewards)
            for index, one in live.unfinished.items():
                session = SessionId(group, index)
                self.begun[session] = one.attempt, one.tokens
                for (turn, call), result in one.results.items():
                    self.results[CallKey(session, one.attempt, turn, call)] = result
            if live.state not in OPEN:
                self._closed.add(group)
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
        for session, place in self.begun.items():
            if (one := _open(state, session)) is not None:
                assert (one.attempt, one.tokens) >= place, session.key()
        for key, result in self.results.items():
            one = _open(state, key.session)
            if one is not None and one.attempt == key.attempt:
                assert one.results[key.turn, key.call] == result, key


def _open(state: ExperienceState, session: SessionId) -> Unfinished | None:
    """What a session has that is not done, of a group that is not terminal."""
    group = state.groups.get(session.group)
    if group is None or group.state not in OPEN or session.index in group.rewards:
        return None
    return group.unfinished.get(session.index, Unfinished())


Rows = dict[int, tuple[SessionsDone, int]]


def settled_rows(storage: Storage) -> dict[int, Rows]:
    """Group → session index → the first record that settled it, and its row."""
    rows: dict[int, Rows] = {}
    for record in logged_records(storage):
        if isinstance(record, SessionsDone):
            for row, session in enumerate(record.sessions):
                rows.setdefault(session.group, {}).setdefault(session.index, (record, row))
    return rows


def logged_records(storage: Storage) -> list[object]:
    """The control records of the kept lineage, in order; none before the run was claimed."""
    if not storage.exists("run.json") or not (newest := highest_incarnation(storage)):
        return []
    head = newest_started(storage, run_id=read_run(storage).run_id, below=newest + 1)
    return [record for _, record in read_lineage(storage, head).records] if head else []


def logged_group(reader: PayloadReader, rows: Rows, group: int) -> RewardedGroup:
    trajectories = []
    rewards = []
    for index, (record, row) in sorted(rows.items()):
        session = SessionId(GroupId(group), index)
        trajectories.append(reader.trajectory(record.payload, row=row, session=session))
        rewards.append(record.rewards[row])
    return RewardedGroup(group, tuple(trajectories), tuple(rewards))
