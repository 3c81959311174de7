"""The state of a run's experience: what the control records of its kept lineage say.

``apply`` is the only way in, for a log that is read back and for records that are being appended
alike, so what a running store believes is what a restart will find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.core.errors import LifecycleError
from perdure.core.experience_records import (
    GroupSettled,
    Partials,
    SessionRestarted,
    SessionsDone,
    Submitted,
    ToolResult,
)
from perdure.core.ids import (
    GlobalStep,
    GroupId,
    IncarnationNumber,
    LocalUpdate,
    LogPosition,
    PolicyVersion,
    SessionId,
    UpdateId,
)
from perdure.core.record_types import GroupOutcome
from perdure.core.records import (
    Checkpointed,
    Closed,
    Collect,
    ControlRecord,
    Evaluated,
    Evicted,
    IncarnationStarted,
    PhaseStep,
    Published,
    Redone,
    Refilled,
    SegmentOpened,
    StepDone,
    Taken,
    UpdateFailed,
)
from perdure.experience.entries import Entry
from perdure.experience.groups import GROUP_RECORDS, GroupTable
from perdure.experience.lifecycle import GroupState
from perdure.experience.prompt_group import Group, SessionBatch
from perdure.experience.unfinished import PartialBatch

NO_VERSION = PolicyVersion(0)
"""Below every version that is published."""


class ExperienceState:
    """Everything the kept lineage says. Read the attributes; change them only through ``apply``.

    Attributes:
        table: Prompt groups, their states, counts and indexes.
        taken: The batches of all local updates, in training order.
        evaluated: By ``(global_step, digest)``.
        redone: By ``(global_step, incarnation that trained it again)``.
        phase_steps: By ``(phase, step)``.
        update_failures: How often training a batch raised, over all incarnations.
        position: End of the last record whose place is known; None for an empty log.
    """

    def __init__(self, *, used_version: PolicyVersion = NO_VERSION) -> None:
        self.used_version = used_version
        """Highest version that void parts of the log published, at least."""
        self.table = GroupTable()
        self.taken: dict[UpdateId, Taken] = {}
        self.step_done: dict[GlobalStep, StepDone] = {}
        self.redone: dict[tuple[GlobalStep, IncarnationNumber], Redone] = {}
        self.published: dict[PolicyVersion, Published] = {}
        self.evaluated: dict[tuple[GlobalStep, str], Evaluated] = {}
        self._checkpoints: dict[str, Checkpointed] = {}
        self.phase_steps: dict[tuple[str, int], PhaseStep] = {}
        self.update_failures: dict[UpdateId, int] = {}
        self.collected: list[str] = []
        """Checkpoint directories that may be deleted, in log order."""
        self.incarnations: list[IncarnationStarted] = []
        self.closed: list[Closed] = []
        self.position: LogPosition | None = None
        self.last_step = GlobalStep(0)
        """Highest global step that is done."""
        self._newest_published = PolicyVersion(0)
        self._version_of: dict[str, PolicyVersion] = {}
        self._in_step: list[UpdateId] = []
        self._positions: dict[str, LogPosition | None] = {}
        self._unplaced: dict[SessionId, SessionBatch] = {}
        """Sessions whose record is not durable yet, by the first of them."""
        self._unplaced_partials: dict[str, PartialBatch] = {}
        """By the key of their record."""
        self._unretired: list[UpdateId] = []
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            SegmentOpened: _nothing_to_count,
            IncarnationStarted: self.incarnations.append,
            Closed: self.closed.append,
            Submitted: self.table.submit,
            GroupSettled: self.table.settle,
            ToolResult: self.table.tool_result,
            SessionRestarted: self.table.restart,
            Evicted: self.table.evict,
            Refilled: self.table.refill,
            Taken: self._take,
            StepDone: self._step_done,
            Redone: self._redone,
            Published: self._published,
            Checkpointed: self._checkpointed,
            Collect: self._collect,
            Evaluated: self._evaluated,
            PhaseStep: self._phase_step,
            UpdateFailed: self._update_failed,
        }

    @property
    def groups(self) -> Mapping[GroupId, Group]:
        """Groups that are not retired."""
        return self.table.live

    @property
    def counts(self) -> Mapping[GroupState, int]:
        """Groups in each state, retired ones included."""
        return self.table.counts

    @property
    def checkpoints(self) -> tuple[Checkpointed, ...]:
        """Committed and not collected, in log order."""
        return tuple(self._checkpoints.values())

    @property
    def newest_version(self) -> PolicyVersion:
        """Highest version that was published; 0 before the first."""
        return self._newest_published

    def version_of(self, digest: str) -> PolicyVersion | None:
        """The version under which these weights were published."""
        return self._version_of.get(digest)

    def updates_of(self, step: GlobalStep) -> list[Taken]:
        """Batches taken in a step, in order."""
        found: list[Taken] = []
        while (update := UpdateId(step, LocalUpdate(len(found)))) in self.taken:
            found.append(self.taken[update])
        return found

    def curve(self) -> list[StepDone]:
        """Each step that is done as it last came out: a redo that drifted supersedes the record."""
        last = {step: redone for (step, _), redone in self.redone.items()}
        return [
            dataclasses.replace(
                done, digest=again.digest, metrics=again.metrics, timings_s=again.timings_s
            )
            if (again := last.get(step)) is not None and not again.equal
            else done
            for step, done in self.step_done.items()
        ]

    @property
    def next_update(self) -> UpdateId:
        """Name of the next batch to take."""
        return UpdateId(GlobalStep(self.last_step + 1), LocalUpdate(len(self._in_step)))

    @property
    def next_version(self) -> PolicyVersion:
        """A version that no engine ever held, in void parts of the log neither."""
        known = (self._newest_published, self.table.newest_version, self.used_version)
        return PolicyVersion(max(known) + 1)

    def apply(self, position: LogPosition | None, record: ControlRecord) -> bool:
        """Count a record; ``position`` is None while it is not durable.

        Returns False, changing nothing, if a record with its key counted before.

        Raises:
            LifecycleError: The record is illegal here; nothing has changed.
        """
        if isinstance(record, SessionsDone):
            counts = self._sessions_done(position, record)
        elif isinstance(record, Partials):
            counts = self._partials(position, record)
        elif isinstance(record, GROUP_RECORDS):
            counts = not self.table.knows(record)
            if counts:
                self._handlers[type(record)](record)
                self.table.note(record)
        else:
            counts = record.key() not in self._positions
            if counts:
                self._handlers[type(record)](record)
                self._positions[record.key()] = position
        if not counts:
            self._refuse_conflict(record)
            return False
        self._advance(position)
        return True

    def acknowledge(self, entries: Sequence[Entry]) -> None:
        """Records that were applied without a place are durable; their entries know where."""
        for entry in entries:
            record = entry.control
            assert record is not None
            if isinstance(record, SessionsDone):
                batch = self._unplaced.pop(record.sessions[0])
                batch.payload, batch.first_row = entry.ref, entry.first_row
            elif isinstance(record, Partials):
                self._unplaced_partials.pop(record.key()).payload = entry.ref
            elif not isinstance(record, GROUP_RECORDS):
                self._positions[record.key()] = entry.position
        self._advance(max([entry.position for entry in entries if entry.position is not None]))

    def position_of(self, record: ControlRecord) -> LogPosition | None:
        """Where the first record with this key ends; None if it is absent or not durable yet.

        Not known of records that concern prompt groups.
        """
        return self._positions.get(record.key())

    def is_poisoned(self, update: UpdateId) -> bool:
        """Whether the groups of a batch were set aside after killing the trainer."""
        groups = self.taken[update].groups
        return any(self.table.state_of(GroupId(g)) is GroupState.EVICTED for g in groups)

    def check(self) -> None:
        """Assert the conservation law and every internal index."""
        self.table.check()
        steps = sorted({update.global_step for update in self.taken})
        assert list(self.taken) == sorted(self.taken)
        assert steps == list(range(1, len(steps) + 1))
        assert list(self.step_done) == list(range(1, self.last_step + 1))
        assert self._in_step == [u for u in self.taken if u.global_step > self.last_step]
        used = [group for record in self.taken.values() for group in record.groups]
        assert len(used) == len(set(used))
        for update, record in self.taken.items():
            done = update.global_step <= self.last_step
            state = GroupState.TRAINED if done else GroupState.TAKEN
            allowed = (state, GroupState.EVICTED)
            assert all(self.table.state_of(GroupId(g)) in allowed for g in record.groups)
        for group in self.table.live.values():
            assert group.submitted.key() in group.keys

    def _sessions_done(self, position: LogPosition | None, record: SessionsDone) -> bool:
        batch = SessionBatch(record, None if position is None else record.payload)
        counts = self.table.sessions_done(batch)
        if counts and position is None:
            self._unplaced[record.sessions[0]] = batch
        return counts

    def _partials(self, position: LogPosition | None, record: Partials) -> bool:
        batch = PartialBatch(record, None if position is None else record.payload)
        counts = self.table.partials(batch)
        if counts and position is None:
            self._unplaced_partials[record.key()] = batch
        return counts

    def _advance(self, position: LogPosition | None) -> None:
        if position is not None and (self.position is None or position > self.position):
            self.position = position

    def _refuse_conflict(self, record: ControlRecord) -> None:
        """A repeated record may not say something else where the first one was acted upon."""
        conflict = False
        match record:
            case Submitted():
                group = self.table.live.get(record.group)
                conflict = group is not None and group.submitted != record
            case Taken():
                conflict = self.taken[record.update].groups != record.groups
            case StepDone():
                conflict = self.step_done[record.global_step].digest != record.digest
            case GroupSettled():
                group = self.table.live.get(record.group)
                failed = record.outcome is GroupOutcome.FAILED
                conflict = group is not None and (group.state is GroupState.FAILED) is not failed
            case ToolResult():
                group = self.table.live.get(record.session.group)
                conflict = group is not None and group.contradicts(record)
            case Published():
                conflict = self.published[record.version].digest != record.digest
            case _:
                pass
        if conflict:
            raise LifecycleError(
                "is in the log already and says something else",
                where=record.key(),
                rule="a record may be repeated, never replaced",
                way_out="log a redone step as redone, changed weights under a new version",
            )

    def _take(self, record: Taken) -> None:
        if record.update != self.next_update:
            raise _out_of_order(record, f"{self.next_update.key()} is next")
        self.table.take([GroupId(group) for group in record.groups])
        self.taken[record.update] = record
        self._in_step.append(record.update)

    def _step_done(self, record: StepDone) -> None:
        if record.global_step != self.last_step + 1 or not self._in_step:
            taken = len(self._in_step)
            raise _out_of_order(record, f"step {self.last_step + 1} is next, {taken} batches taken")
        for update in self._in_step:
            self.table.train(GroupId(group) for group in self.taken[update].groups)
        self.step_done[record.global_step] = record
        self.last_step = record.global_step
        self._unretired += self._in_step
        self._in_step = []

    def _redone(self, record: Redone) -> None:
        if record.global_step not in self.step_done:
            raise _out_of_order(record, "only a step that was done can be done again")
        self.redone[record.global_step, record.incarnation] = record

    def _published(self, record: Published) -> None:
        self.published[record.version] = record
        self._newest_published = max(self._newest_published, record.version)
        self._version_of[record.digest] = record.version

    def _evaluated(self, record: Evaluated) -> None:
        self.evaluated[record.global_step, record.digest] = record

    def _phase_step(self, record: PhaseStep) -> None:
        self.phase_steps[record.phase, record.step] = record

    def _update_failed(self, record: UpdateFailed) -> None:
        if record.update not in self.taken:
            raise _out_of_order(record, "only a batch that was taken can fail")
        self.update_failures[record.update] = self.update_failures.get(record.update, 0) + 1

    def _checkpointed(self, record: Checkpointed) -> None:
        self._checkpoints[record.directory] = record

    def _collect(self, record: Collect) -> None:
        self.collected += record.directories
        for directory in record.directories:
            self._checkpoints.pop(directory, None)
        if self._checkpoints:
            oldest = min(c.step if c.phase == "train" else 0 for c in self.checkpoints)
            self._retire_trained(GlobalStep(oldest))

    def _retire_trained(self, upto: GlobalStep) -> None:
        """No kept checkpoint lies before ``upto``: nobody will train those groups again."""
        count = 0
        for update in self._unretired:
            if update.global_step > upto:
                break
            for group in self.taken[update].groups:
                self.table.retire(GroupId(group))
            count += 1
        del self._unretired[:count]


def _nothing_to_count(record: SegmentOpened) -> None:
    del record


def _out_of_order(record: ControlRecord, instead: str) -> LifecycleError:
    return LifecycleError(
        f"is out of order: {instead}",
        where=record.key(),
        rule="steps and local updates follow one another without gaps",
        way_out="run `perdure audit` on the run and report what it finds",
    )
