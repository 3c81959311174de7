"""The store against a naive model: any legal history, crashes and restarts at any moment.

The model keeps the list of records and recomputes everything from it. After a crash the log must
hold a prefix of that list that contains everything acknowledged.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import experience_records as make
import pytest
from experience_model import SESSIONS, Model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_cases import keys_of

from perdure.core.clock import ManualClock
from perdure.core.errors import LifecycleError
from perdure.core.experience_records import (
    Partials,
    SessionRestarted,
    SessionsDone,
    ToolResult,
)
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, LogPosition, PolicyVersion, SessionId
from perdure.core.record_types import DECISION_TYPES, EvictionReason, GroupOutcome
from perdure.core.records import (
    Checkpointed,
    Collect,
    ControlRecord,
    Taken,
)
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    GroupState,
    LogOptions,
    RunInfo,
    claim_experience,
    create_run,
)
from perdure.experience.claims import newest_started
from perdure.experience.reader import read_lineage
from perdure.storage.memory import MemoryStorage
from perdure.storage.memory_disk import PowerLost

RUN_ID = "5" * 32


class StoreMachine(RuleBasedStateMachine):
    """Appends in inline mode: nothing reaches the disk but in ``flush``."""

    @initialize(seed=st.integers(0, 2**20))
    def begin(self, seed: int) -> None:
        self.storage = MemoryStorage(seed)
        create_run(self.storage, RunInfo(RUN_ID, 0.0))
        self.records: list[ControlRecord] = []
        self.acknowledged = 0
        self.bases: dict[str, tuple[LogPosition, int]] = {}
        self.watched: ExperienceStore | None = None
        self.cursor = 0
        self.known: dict[GroupId, GroupState] = {}
        self.store = self.open()

    def open(self, base: LogPosition | None = None) -> ExperienceStore:
        claimed = claim_experience(
            self.storage,
            clock=ManualClock(),
            faults=NoFaults(),
            options=LogOptions(threaded=False, segment_bytes=2048),
        )
        return claimed.start(base_position=base, cache_bytes=300)

    @property
    def model(self) -> Model:
        return Model.of(self.records)

    def log(self, *records: ControlRecord) -> None:
        self.records += records

    # What a trainer does.

    @rule(count=st.integers(1, 3))
    def submit(self, count: int) -> None:
        first = self.store.state.table.next_group
        step = self.model.steps + 1
        new = [make.submitted(first + i, step=step, sessions=SESSIONS) for i in range(count)]
        self.store.submit(new)
        self.log(*new)

    @precondition(lambda self: self.model.among("pending", "running"))
    @rule(
        pick=st.integers(0, 99), index=st.integers(0, SESSIONS - 1), reward=st.sampled_from([0, 1])
    )
    def session_done(self, pick: int, index: int, reward: int) -> None:
        groups = self.model.among("pending", "running")
        group = groups[pick % len(groups)]
        self.store.start_sessions([SessionId(GroupId(group), index)])
        self.store.session_done(make.trajectory(group, index), reward=reward)
        if index not in self.model.done[group]:
            self.log(make.session_done(group, index, reward=reward))

    @precondition(lambda self: self.model.among("pending", "running"))
    @rule(picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, SESSIONS - 1)), min_size=1))
    def sessions_done(self, picks: list[tuple[int, int]]) -> None:
        groups = self.model.among("pending", "running")
        sessions = [(groups[pick % len(groups)], index) for pick, index in picks]
        trajectories = [make.trajectory(group, index) for group, index in sessions]
        self.store.sessions_done([FinishedSession(t, 1.0, {}) for t in trajectories])
        new = {(g, i): None for g, i in sessions if i not in self.model.done[g]}
        if new:
            self.log(make.sessions_done(new))

    @precondition(lambda self: self.model.unfinished())
    @rule(
        picks=st.lists(st.integers(0, 99), min_size=1, max_size=4),
        back=st.integers(0, 3),
        new=st.integers(0, 5),
    )
    def partials(self, picks: list[int], back: int, new: int) -> None:
        """Sessions go on, and say a little again of what is in the log already."""
        model, rows = self.model, []
        unfinished = model.unfinished()
        sessions = {unfinished[pick % len(unfinished)]: None for pick in picks}
        deltas = []
        for session in sessions:
            attempt = model.attempt(session)
            start, end = max(0, attempt.tokens - back), attempt.tokens + new
            delta = make.delta(session.group, session.index, start, end, attempt=attempt.number)
            deltas.append(delta)
            rows.append((session, attempt.number, attempt.tokens, end))
        self.store.partials(deltas)
        if new:
            self.log(partials_record(rows))

    @precondition(lambda self: self.model.unfinished())
    @rule(pick=st.integers(0, 99), gap=st.integers(1, 3))
    def refused_partial(self, pick: int, gap: int) -> None:
        unfinished = self.model.unfinished()
        session = unfinished[pick % len(unfinished)]
        attempt = self.model.attempt(session)
        start = attempt.tokens + gap
        with pytest.raises(LifecycleError):
            self.store.partials([make.delta(session.group, session.index, start, start + 1)])

    @precondition(lambda self: self.model.unfinished())
    @rule(pick=st.integers(0, 99), turn=st.integers(0, 1), result=st.sampled_from("xy"))
    def tool_result(self, pick: int, turn: int, result: str) -> None:
        unfinished = self.model.unfinished()
        session = unfinished[pick % len(unfinished)]
        attempt = self.model.attempt(session)
        record = make.tool_result(
            session.group, session.index, turn=turn, attempt=attempt.number, result=result
        )
        known = attempt.results.get((turn, 0))
        if known not in (None, result):
            with pytest.raises(LifecycleError):
                self.store.tool_result(record)
            return
        self.store.tool_result(record)
        if known is None:
            self.log(record)

    @precondition(lambda self: self.model.unfinished())
    @rule(pick=st.integers(0, 99))
    def restart_session(self, pick: int) -> None:
        unfinished = self.model.unfinished()
        session = unfinished[pick % len(unfinished)]
        attempt = self.model.attempt(session)
        self.store.restart_session(session, attempt=attempt.number + 1, reason="start again")
        self.log(make.restarted(session.group, session.index, attempt=attempt.number + 1))

    @precondition(lambda self: self.model.among("pending", "running"))
    @rule(pick=st.integers(0, 99), fail=st.sampled_from([False, False, True]))
    def settle(self, pick: int, fail: bool) -> None:
        groups = self.model.among("pending", "running")
        group = groups[pick % len(groups)]
        outcome = GroupOutcome.FAILED if fail else GroupOutcome.FINISHED
        if not fail and len(self.model.done[group]) < SESSIONS:
            with pytest.raises(LifecycleError):
                self.store.settle(GroupId(group), outcome)
            return
        self.store.settle(GroupId(group), outcome)
        self.log(make.settled(group, outcome))

    @precondition(lambda self: self.model.among("pending", "running"))
    @rule()
    def finish_the_oldest(self) -> None:
        for group in self.store.open_groups()[:1]:
            for session in group.missing:
                trajectory = make.trajectory(session.group, session.index)
                self.store.session_done(trajectory, reward=1.0)
                self.log(make.session_done(session.group, session.index))
            self.store.settle(group.submitted.group, GroupOutcome.FINISHED)
            self.log(make.settled(group.submitted.group))

    @precondition(lambda self: self.model.among("finished"))
    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        oldest = self.model.among("finished")[:count]
        assert self.store.oldest_finished(count) == oldest
        update = self.store.state.next_update
        groups = [GroupId(group) for group in oldest]
        self.store.take(update, groups=groups, config_digest="config")
        self.log(Taken(update, tuple(groups), "config"))

    @precondition(lambda self: self.model.among("taken"))
    @rule()
    def step_done(self) -> None:
        record = make.step_done(self.model.steps + 1)
        self.store.append(record)
        self.log(record)

    @rule(count=st.integers(1, 2))
    def train_a_whole_step(self, count: int) -> None:
        self.submit(count)
        for _ in self.store.open_groups():
            self.finish_the_oldest()
        self.take(count)
        self.step_done()
        self.flush()

    @precondition(lambda self: self.model.among("finished", "failed"))
    @rule(pick=st.integers(0, 99))
    def evict(self, pick: int) -> None:
        groups = self.model.among("finished", "failed")
        group = groups[pick % len(groups)]
        reason = (GroupId(group), EvictionReason.AGE)
        self.store.evict([reason], global_step=GlobalStep(1))
        self.log(make.evicted(group))

    @precondition(lambda self: self.model.owed)
    @rule()
    def refill(self) -> None:
        model, group = self.model, self.store.state.table.next_group
        new = [
            make.submitted(group + i, step=model.steps + 1, sessions=SESSIONS)
            for i in range(len(model.owed))
        ]
        self.store.refill(new)
        for record, replaces in zip(new, model.owed, strict=True):
            self.log(record, make.refilled(record.group, replaces))

    @precondition(lambda self: not self.model.among("taken"))
    @rule()
    def checkpoint(self) -> None:
        self.flush()
        record = Checkpointed(
            f"step-{self.model.steps:08d}-{len(self.records)}",
            "train",
            self.model.steps,
            "digest",
            self.store.position,
        )
        self.bases[record.directory] = (self.store.position, len(self.records))
        self.store.commit(record)
        self.log(record)

    @precondition(lambda self: len(self.model.checkpoints) > 1)
    @rule()
    def collect(self) -> None:
        record = Collect((self.model.checkpoints[0],))
        self.store.collect(record)
        self.log(record)

    @precondition(lambda self: self.records)
    @rule(pick=st.integers(0, 999))
    def repeat(self, pick: int) -> None:
        record = self.records[pick % len(self.records)]
        if isinstance(record, SessionsDone):
            others = [make.trajectory(s.group, s.index, length=7) for s in record.sessions]
            self.store.sessions_done([FinishedSession(other, 0.5, {}) for other in others])
        elif isinstance(record, Partials | ToolResult | SessionRestarted):
            # Of a group that is settled meanwhile there may be nothing left to compare with.
            with contextlib.suppress(LifecycleError):
                self.repeat_unfinished(record)
        else:
            self.store.append(record)

    def repeat_unfinished(self, record: Partials | ToolResult | SessionRestarted) -> None:
        if isinstance(record, ToolResult):
            self.store.tool_result(record)
        elif isinstance(record, SessionRestarted):
            self.store.append(record)
        else:
            columns = zip(record.sessions, record.attempts, record.starts, record.ends, strict=True)
            self.store.partials(
                [make.delta(s.group, s.index, a, b, attempt=n) for s, n, a, b in columns]
            )

    @rule()
    def flush(self) -> None:
        self.store.flush(1)
        self.acknowledged = len(self.records)

    # What happens to it.

    @rule(how=st.sampled_from(["close", "power", "power", "kill"]), steps=st.integers(0, 12))
    def stop_and_go_on(self, how: str, steps: int) -> None:
        """An orderly end, or a loss of power or a kill after some steps of a commit."""
        if how == "close":
            self.store.close("end")
            self.acknowledged = len(self.records)
        else:
            self.storage.fail_after = self.storage.operations + steps
            with contextlib.suppress(PowerLost):
                self.flush()
            found = self.storage.crash if how == "power" else self.storage.process_kill
            self.storage = found()
            self.storage.fail_after = None
        self.store = self.open()
        kept = self.compare_with_log(upto=len(self.records))
        assert self.acknowledged <= kept
        self.records = self.records[:kept]
        self.acknowledged = kept

    @precondition(lambda self: self.model.checkpoints)
    @rule(pick=st.integers(0, 99))
    def rewind(self, pick: int) -> None:
        self.flush()
        names = self.model.checkpoints
        position, count = self.bases[names[pick % len(names)]]
        self.storage = self.storage.process_kill()
        self.store = self.open(base=position)
        self.records = [
            record
            for index, record in enumerate(self.records)
            if index < count
            or record.type not in DECISION_TYPES
            or (isinstance(record, Checkpointed) and record.position <= position)
        ]
        self.acknowledged = len(self.records)
        self.compare_with_log()

    def compare_with_log(self, upto: int | None = None) -> int:
        """The log holds these records in this order, up to a count that is returned.

        What settles groups may stand behind sessions that were logged later.
        """
        head = newest_started(self.storage, run_id=RUN_ID, below=self.store.incarnation + 1)
        keys = [key for _, r in read_lineage(self.storage, head).records for key in keys_of(r)]
        found = [key for key in keys if not key.startswith(("incarnation/", "closed/"))]
        count, expected = 0, list[str]()
        while count < len(self.records) and (upto is None or len(expected) < len(found)):
            expected += keys_of(self.records[count])
            count += 1
        for settles in (True, False):
            some, wanted = (
                [key for key in keys if key.startswith("group_settled/") is settles]
                for keys in (found, expected)
            )
            assert some == wanted
        return count

    @invariant()
    def changes_tell_every_state(self) -> None:
        """A consumer that asks now and then knows the state of every group."""
        if self.watched is not self.store:
            self.watched, self.cursor, self.known = self.store, 0, {}
        found = self.store.changes(self.cursor)
        assert found.complete
        self.cursor = found.cursor
        self.known |= found.states
        state = self.store.state
        assert self.known == {g: state.table.state_of(g) for g in range(state.table.next_group)}
        assert self.store.changes(self.cursor).states == {}

    @invariant()
    def agrees_with_the_model(self) -> None:
        model, state = self.model, self.store.state
        self.store.check()
        counts = Counter(model.state.values())
        for name in ("finished", "failed", "taken", "trained", "evicted"):
            by_value = {s.value: n for s, n in state.counts.items()}
            assert by_value.get(name, 0) == counts[name], name
        assert sum(state.counts.values()) == len(model.state)
        assert list(state.table.finished) == model.among("finished")
        open_groups = self.store.open_groups()
        assert [g.submitted.group for g in open_groups] == model.among("pending", "running")
        for group in open_groups:
            missing = {session.index for session in group.missing}
            assert missing == set(range(SESSIONS)) - model.done[group.submitted.group]
        assert {u.key(): t.groups for u, t in state.taken.items()} == model.taken
        assert state.last_step == model.steps
        assert list(state.table.owed) == model.owed
        assert [c.directory for c in self.store.committed()] == model.checkpoints

    @invariant()
    def unfinished_sessions_go_on_from_what_they_left(self) -> None:
        attempts = self.model.attempts
        begun = {s: b for group in self.store.open_groups() for s, b in group.begun.items()}
        assert {(s.group, s.index) for s in begun} == attempts.keys()
        prefixes = self.store.prefixes(list(begun))
        for session, some in begun.items():
            attempt = attempts[session.group, session.index]
            assert (some.attempt, some.tokens) == (attempt.number, attempt.tokens)
            whole = make.delta(
                session.group, session.index, 0, attempt.tokens, attempt=attempt.number
            )
            found = prefixes[session]
            assert found.attempt == attempt.number
            assert found.response_ids_T.tolist() == whole.token_ids_N.tolist()
            assert found.logprobs_T.tolist() == whole.logprobs_N.tolist()
            assert found.loss_mask_T.tolist() == whole.loss_mask_N.tolist()
            assert [s.end for s in found.segments] == [attempt.tokens] * bool(attempt.tokens)
            results = self.store.tool_results(session)
            assert {call: result.result for call, result in results.items()} == attempt.results

    @invariant()
    def finished_groups_can_be_read(self) -> None:
        for group in self.model.among("finished", "taken")[-2:]:
            found = self.store.rewarded_group(GroupId(group))
            for index, trajectory in enumerate(found.trajectories):
                expected = make.trajectory(group, index)
                assert trajectory.response_ids_T.tolist() == expected.response_ids_T.tolist()


def partials_record(rows: list[tuple[SessionId, int, int, int]]) -> Partials:
    """A record of these sessions, attempts, starts and ends."""
    sessions, attempts, starts, ends = zip(*rows, strict=True)
    versions = (PolicyVersion(0),) * len(rows)
    return Partials(sessions, attempts, starts, ends, versions, versions, make.REF)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
