"""Every prompt group of a run: its state, its settled sessions, and the indexes sampling needs.

Updates cost the same however long the run is. Groups that are evicted, or trained before the
oldest checkpoint that is still kept, are *retired*: only their state and which sessions were done
stay in memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from perdure.core.errors import LifecycleError
from perdure.core.experience_records import (
    GroupSettled,
    SessionRestarted,
    Submitted,
    ToolResult,
)
from perdure.core.ids import GroupId, PolicyVersion, SessionId
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.core.records import Evicted, Refilled
from perdure.experience.changes import ChangeFeed, GroupChanges
from perdure.experience.lifecycle import OPEN, GroupEvent, GroupState, advance
from perdure.experience.prompt_group import Group, Retired, SessionBatch
from perdure.experience.unfinished import PartialBatch, Unfinished

GroupRecord = Submitted | GroupSettled | ToolResult | SessionRestarted | Evicted | Refilled
"""Records that concern a single prompt group."""
_SESSION_RECORDS = (ToolResult, SessionRestarted)
GROUP_RECORDS = (Submitted, GroupSettled, ToolResult, SessionRestarted, Evicted, Refilled)


def group_of(record: GroupRecord) -> GroupId:
    """The group a record concerns (for a refill: the group it replaces)."""
    if isinstance(record, _SESSION_RECORDS):
        return record.session.group
    return record.replaces if isinstance(record, Refilled) else record.group


class GroupTable:
    """All groups, by state; changed only by records (and by the volatile :meth:`progress`)."""

    def __init__(self) -> None:
        self.live: dict[GroupId, Group] = {}
        self.retired: dict[GroupId, Retired] = {}
        self.counts: Counter[GroupState] = Counter()
        self.evictions: Counter[EvictionReason] = Counter()
        self.owed: dict[GroupId, Evicted] = {}
        """Evictions without a refill, oldest first."""
        self.refills: set[GroupId] = set()
        """Groups that replaced another one."""
        self.next_group = GroupId(0)
        """Id of the next submission; ids count from 0 without gaps."""
        self.next_data_index = 0
        self.feed = ChangeFeed()
        """Groups in the order in which their states changed."""
        self.newest_version = PolicyVersion(0)
        """Highest version that generated a settled session."""
        self._open: dict[GroupId, None] = {}
        self._failed: dict[GroupId, None] = {}
        self._finished: list[GroupId] = []

    @property
    def finished(self) -> Sequence[GroupId]:
        """Finished groups, oldest submission first. Not a copy: do not keep it over an update."""
        return self._finished

    def open(self) -> Iterator[Group]:
        """Pending and running groups, oldest submission first."""
        return (self.live[group] for group in self._open)

    def failed(self) -> Iterator[Group]:
        """Failed groups that are not evicted, in the order in which they failed."""
        return (self.live[group] for group in self._failed)

    def changes(self, cursor: int) -> GroupChanges:
        """What changed after ``cursor``; 0 asks for everything since the fold began."""
        changed = self.feed.since(cursor)
        groups = self.live if changed is None else changed
        states = {group: self.state_of(group) for group in groups}
        return GroupChanges(self.feed.cursor, states, complete=changed is not None)

    def state_of(self, group: GroupId) -> GroupState:
        """Raises ``LifecycleError`` for a group that was never submitted."""
        retired = self.retired.get(group)
        return retired.state if retired is not None else self._live(group).state

    def knows(self, record: GroupRecord) -> bool:
        """Whether a record with this key has counted."""
        live = self.live.get(group_of(record))
        if live is not None:
            return record.key() in live.keys
        retired = self.retired.get(group_of(record))
        if retired is None:
            return False
        match record:
            case ToolResult() | SessionRestarted():
                return retired.has(record.session.index)
            case Evicted():
                return retired.state is GroupState.EVICTED
            case Refilled():
                return retired.state is GroupState.EVICTED and record.replaces not in self.owed
            case _:
                return True

    def note(self, record: GroupRecord) -> None:
        """Remember that a record with this key has counted."""
        live = self.live.get(group_of(record))
        if live is not None:
            live.keys.add(record.key())

    def is_settled(self, session: SessionId) -> bool:
        """Whether the session's reward is settled."""
        live = self.live.get(session.group)
        if live is not None:
            return session.index in live.rewards
        retired = self.retired.get(session.group)
        return retired is not None and retired.has(session.index)

    def any_settled(self, sessions: Sequence[tuple[GroupId, int]]) -> bool:
        """Whether one of them, as groups and indexes, is settled, or comes twice."""
        if len(set(sessions)) < len(sessions):
            return True
        for number in {group for group, _ in sessions}:
            live = self.live.get(number)
            if live is None or live.rewards:
                return any(self.is_settled(SessionId(*session)) for session in sessions)
        return False

    # Each of the methods below validates everything before it changes anything.

    def submit(self, record: Submitted) -> None:
        """A new group enters."""
        if record.group != self.next_group:
            raise _illegal(record.group, f"submitted where group {self.next_group} is next")
        if record.data_index != self.next_data_index:
            raise _illegal(
                record.group,
                f"data index {record.data_index} submitted where {self.next_data_index} is next",
            )
        if record.sessions < 1:
            raise _illegal(record.group, f"submitted with {record.sessions} sessions")
        self.live[record.group] = Group(record)
        self.counts[GroupState.PENDING] += 1
        self.feed.add(record.group)
        self._open[record.group] = None
        self.next_group = GroupId(record.group + 1)
        self.next_data_index += 1

    def progress(self, session: SessionId) -> None:
        """A session was started or left something durable."""
        group = self._live(session.group)
        self._check_index(group, session)
        self._move(group, GroupEvent.PROGRESS)

    def require_open(self, session: SessionId) -> Group:
        """The session's group.

        Raises:
            LifecycleError: It is neither pending nor running, or has no such session.
        """
        group = self._live(session.group)
        self._check_index(group, session)
        if group.state is not GroupState.RUNNING:
            advance(session.group, group.state, GroupEvent.PROGRESS)
        return group

    def sessions_done(self, batch: SessionBatch) -> bool:
        """Rewards of sessions are settled; False if those of all of them were before."""
        record = batch.record
        fresh = self._unsettled(record.sessions)
        for number, rows in fresh.items():
            group = self.live[number]
            if group.state is not GroupState.RUNNING:
                self._move(group, GroupEvent.PROGRESS)
            group.settle(batch, rows)
        versions = [record.last_versions[row] for rows in fresh.values() for row in rows.values()]
        self.newest_version = max([self.newest_version, *versions])
        return bool(fresh)

    def unfinished(self, session: SessionId) -> Unfinished:
        """What a session of an open group has left so far; not to be changed.

        Raises:
            LifecycleError: The session is unknown or done, or its group is terminal.
        """
        group = self.require_open(session)
        if session.index in group.rewards:
            raise _illegal(session.group, f"session {session.index} goes on after its end")
        return group.unfinished.get(session.index) or Unfinished()

    def partials(self, batch: PartialBatch) -> bool:
        """Sessions left some more tokens; False if all of these counted before."""
        record, newest = batch.record, self.newest_version
        open_rows = [r for r, session in enumerate(record.sessions) if not self.is_settled(session)]
        fresh = [r for r in open_rows if self.unfinished(record.sessions[r]).lacks(record, r)]
        for row in fresh:
            self._begin(record.sessions[row]).extend(batch, row)
            newest = max(newest, record.last_versions[row])
        self.newest_version = newest
        return bool(fresh)

    def tool_result(self, record: ToolResult) -> None:
        """A session called a tool."""
        self.unfinished(record.session).require_attempt(record)
        self._begin(record.session).results[record.turn, record.call] = record

    def restart(self, record: SessionRestarted) -> None:
        """A session starts again from its prompt."""
        self.unfinished(record.session).require_next(record)
        self._begin(record.session).restart()

    def _unsettled(self, sessions: Sequence[SessionId]) -> dict[GroupId, dict[int, int]]:
        """Group → session index → place among the sessions, of those that are not settled.

        Raises:
            LifecycleError: A group is not open, or has no such session; or one occurs twice.
        """
        placed: dict[GroupId, dict[int, int]] = {}
        for row, session in enumerate(sessions):
            rows = placed.get(session.group)
            if rows is None:
                rows = placed[session.group] = {}
            rows[session.index] = row
        if sum(map(len, placed.values())) < len(sessions):
            raise _illegal(sessions[0].group, "a session occurs twice in one record")
        fresh: dict[GroupId, dict[int, int]] = {}
        for number, rows in placed.items():
            live = self.live.get(number)
            if live is None or live.rewards:
                rows = {i: row for i, row in rows.items() if not self.is_settled(sessions[row])}
            if rows:
                lowest, highest = min(rows), max(rows)
                group = self.require_open(sessions[rows[lowest]])
                if highest > lowest:
                    self._check_index(group, sessions[rows[highest]])
                fresh[number] = rows
        return fresh

    def settle(self, record: GroupSettled) -> None:
        """A group becomes terminal."""
        group = self._live(record.group)
        finished = record.outcome is GroupOutcome.FINISHED
        if finished and len(group.rewards) < group.submitted.sessions:
            raise _illegal(record.group, f"settled as finished without {group.missing[0].key()}")
        self._move(group, GroupEvent.FINISH if finished else GroupEvent.FAIL)
        group.reason = record.reason
        group.unfinished.clear()
        del self._open[record.group]
        if finished:
            rewards = set(group.rewards.values())
            group.uniform = len(rewards) == 1 < len(group.rewards)
            insort(self._finished, record.group)
        else:
            self._failed[record.group] = None

    def take(self, groups: Sequence[GroupId]) -> None:
        """These groups are sampled: only finished ones, oldest submission first, each once."""
        oldest = self._finished[: len(groups)]
        if not groups or list(groups) != oldest:
            raise LifecycleError(
                f"groups {_short(groups)} taken where the oldest finished are {_short(oldest)}",
                where="taken",
                rule="only finished groups are taken, oldest submission first, each once",
                way_out="sample with oldest_finished",
            )
        for group in groups:
            self._move(self.live[group], GroupEvent.TAKE)
        del self._finished[: len(groups)]

    def train(self, groups: Iterable[GroupId]) -> None:
        """The step that took these groups is done; groups set aside as poison stay evicted."""
        for group in groups:
            if self.state_of(group) is not GroupState.EVICTED:
                self._move(self._live(group), GroupEvent.TRAIN)

    def evict(self, record: Evicted) -> None:
        """A group leaves without being trained, and a prompt is owed for it."""
        group = self._live(record.group)
        before = group.state
        poison = record.reason is EvictionReason.POISON
        self._move(group, GroupEvent.POISON if poison else GroupEvent.EVICT)
        if before is GroupState.FINISHED:
            del self._finished[bisect_left(self._finished, record.group)]
        elif before is GroupState.FAILED:
            del self._failed[record.group]
        self.evictions[record.reason] += 1
        self.owed[record.group] = record
        self.retire(record.group)

    def refill(self, record: Refilled) -> None:
        """A submitted group pays for an eviction."""
        self._live(record.group)
        if record.replaces not in self.owed or record.group in self.refills:
            raise _illegal(
                record.group, f"refills group {record.replaces}, for which no prompt is owed"
            )
        del self.owed[record.replaces]
        self.refills.add(record.group)

    def retire(self, group: GroupId) -> None:
        """Forget everything about a terminal group but its state."""
        live = self.live.get(group)
        if live is None:
            return
        assert live.state in (GroupState.TRAINED, GroupState.EVICTED)
        # In this order a group has a state at every moment, also for a thread that only looks.
        self.retired[group] = Retired(live.state, sum([1 << index for index in live.rewards]))
        del self.live[group]

    def check(self) -> None:
        """Assert the conservation law and that every index agrees with the groups."""
        states = Counter(group.state for group in self.live.values())
        states.update(retired.state for retired in self.retired.values())
        assert {s: n for s, n in self.counts.items() if n} == dict(states)
        assert sum(self.counts.values()) == self.next_group
        assert not self.live.keys() & self.retired.keys()
        assert set(self.live) | set(self.retired) == set(range(self.next_group))
        assert list(self._open) == sorted(g for g, v in self.live.items() if v.state in OPEN)
        assert self._finished == sorted(self._in(GroupState.FINISHED))
        assert set(self._failed) == set(self._in(GroupState.FAILED))
        assert self.owed.keys() <= {
            g for g, v in self.retired.items() if v.state is GroupState.EVICTED
        }
        assert self.counts[GroupState.EVICTED] == len(self.owed) + len(self.refills)
        assert self.counts[GroupState.EVICTED] == sum(self.evictions.values())
        for group in self.live.values():
            assert all(0 <= i < group.submitted.sessions for i in group.rewards)
            assert not group.unfinished.keys() & group.rewards.keys()
            assert group.state is GroupState.RUNNING or not group.unfinished
            for unfinished in group.unfinished.values():
                unfinished.check()
            if group.state not in (*OPEN, GroupState.FAILED):
                assert not group.missing

    def _in(self, state: GroupState) -> Iterator[GroupId]:
        return (group for group, value in self.live.items() if value.state is state)

    def _live(self, group: GroupId) -> Group:
        live = self.live.get(group)
        if live is not None:
            return live
        retired = self.retired.get(group)
        raise _illegal(group, f"already {retired.state.value}" if retired else "never submitted")

    def _move(self, group: Group, event: GroupEvent) -> None:
        before = group.state
        after = advance(group.submitted.group, before, event)
        if after is not before:
            self.counts[before] -= 1
            self.counts[after] += 1
            group.state = after
            self.feed.add(group.submitted.group)

    def _begin(self, session: SessionId) -> Unfinished:
        group = self.live[session.group]
        self._move(group, GroupEvent.PROGRESS)
        return group.unfinished.setdefault(session.index, Unfinished())

    def _check_index(self, group: Group, session: SessionId) -> None:
        if not 0 <= session.index < group.submitted.sessions:
            raise _illegal(
                session.group,
                f"session {session.index} of a group with {group.submitted.sessions} sessions",
            )


def _short(groups: Sequence[GroupId]) -> str:
    shown = ", ".join(str(group) for group in groups[:8])
    return f"[{shown}{', …' if len(groups) > 8 else ''}]"


def _illegal(group: GroupId, what: str) -> LifecycleError:
    return LifecycleError(
        what,
        where=f"group {group}",
        rule="groups and data are submitted in order, each once, and settle once",
        way_out="run `perdure audit` on the run and report what it finds",
    )
