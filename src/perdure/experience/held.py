"""What a running store can tell of the experience it holds, in memory and in the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perdure.core.errors import LifecycleError
from perdure.core.experience_records import Submitted, ToolResult
from perdure.core.ids import GlobalStep, GroupId, SessionId
from perdure.core.records import Checkpointed
from perdure.core.trajectories import RewardedGroup, SessionPrefix, Trajectory
from perdure.experience.appender import Appender
from perdure.experience.changes import GroupChanges
from perdure.experience.continuation import Begun, Continuations
from perdure.experience.lifecycle import OPEN, GroupState
from perdure.experience.payloads import PayloadReader
from perdure.experience.prompt_group import Group
from perdure.experience.state import ExperienceState
from perdure.experience.step_metrics import metrics_of_step
from perdure.experience.trajectory_cache import TrajectoryCache


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that is not terminal: its prompt, and the sessions still to be run.

    With no session missing, all that is left is to settle it. ``begun`` are those of the missing
    ones that have something in the log; ``prefix`` and ``tool_results`` say what.
    """

    submitted: Submitted
    missing: tuple[SessionId, ...]
    begun: Mapping[SessionId, Begun] = field(default_factory=dict[SessionId, Begun])


class HeldExperience:
    """The reading half of a store. Thread-safe; it appends nothing.

    Args:
        state: The fold over everything appended.
        appender: Keeps fold, log and cache in step.
        reader: Of tokens that are in the log.
        cache: Of trajectories at hand.

    Attributes:
        state: The fold over everything appended, acknowledged or not. Read it from the thread that
            appends.
    """

    def __init__(
        self,
        state: ExperienceState,
        *,
        appender: Appender,
        reader: PayloadReader,
        cache: TrajectoryCache,
    ) -> None:
        self.state = state
        self._appender = appender
        self._reader = reader
        self._cache = cache
        self._continuations = Continuations(state.table, appender=appender, reader=reader)
        self._lock = appender.lock

    def committed(self) -> tuple[Checkpointed, ...]:
        """Checkpoints of the kept lineage that are not collected, oldest first."""
        with self._lock:
            return self.state.checkpoints

    def metrics_of(self, step: GlobalStep) -> dict[str, float]:
        """See :func:`~perdure.experience.step_metrics.metrics_of_step`."""
        with self._lock:
            return metrics_of_step(self.state, step)

    def oldest_finished(self, count: int) -> list[GroupId]:
        """Up to ``count`` groups to take next: finished ones, oldest submission first."""
        with self._lock:
            return list(self.state.table.finished[:count])

    def changes(self, cursor: int) -> GroupChanges:
        """Groups whose state changed after ``cursor``, an earlier answer's; start with 0.

        The cost depends on how much changed, not on how long the run is. A cursor is good for one
        incarnation.
        """
        with self._lock:
            return self.state.table.changes(cursor)

    def open_groups(self) -> list[OpenGroup]:
        """Groups that are not terminal, oldest first: what a restart dispatches again."""
        with self._lock:
            return [_open_group(group) for group in self.state.table.open()]

    def prefix(self, session: SessionId) -> SessionPrefix:
        """Where an unfinished session goes on: :meth:`prefixes` of one."""
        return self.prefixes([session])[session]

    def prefixes(self, sessions: Sequence[SessionId]) -> dict[SessionId, SessionPrefix]:
        """What unfinished sessions have in the log, or on the way to it; empty where nothing is.

        Many at once cost less: every record is read and verified once.

        Raises:
            LifecycleError: A session is unknown or done, or its group is terminal.
            DamagedError: Tokens that were logged cannot be read. They are not taken for absent.
        """
        with self._lock:
            return self._continuations.prefixes(sessions)

    def tool_results(self, session: SessionId) -> dict[tuple[int, int], ToolResult]:
        """Journaled results of an unfinished session's newest attempt, by ``(turn, call)``.

        Raises:
            LifecycleError: The session is unknown or done, or its group is terminal.
        """
        with self._lock:
            return dict(self.state.table.unfinished(session).results)

    def open_group(self, group: GroupId) -> OpenGroup:
        """A group that is not terminal.

        Raises:
            LifecycleError: It is, or was never submitted.
        """
        with self._lock:
            live = self.state.groups.get(group)
            if live is None or live.state not in OPEN:
                state = self.state.table.state_of(group)
                raise LifecycleError(
                    f"it was to be run while {state.value}",
                    where=f"group {group}",
                    rule="only groups that are pending or running are run",
                    way_out="run `perdure audit` on the run and report what it finds",
                )
            return _open_group(live)

    def rewarded_group(self, group: GroupId) -> RewardedGroup:
        """Trajectories and rewards of a finished group, in session order.

        Arrays are those handed to :meth:`session_done` while they are at hand, and read-only views
        of the mapped log otherwise; the bytes are the same.

        Raises:
            LifecycleError: The group has not finished, was evicted, or was trained so long ago that
                no kept checkpoint needs it.
            DamagedError: Its tokens cannot be read.
        """
        with self._lock:
            self._appender.place_acknowledged()
            live = self.state.groups.get(group)
            if live is None or live.state in (*OPEN, GroupState.FAILED):
                state = self.state.table.state_of(group)
                raise LifecycleError(
                    f"its trajectories were asked for while {state.value}",
                    where=f"group {group}",
                    rule="a finished group is read until no kept checkpoint needs it",
                    way_out="read it between its settling and the checkpoint after its step",
                )
            indexes = range(live.submitted.sessions)
            trajectories = tuple([self._trajectory(live, index) for index in indexes])
            rewards = tuple([live.rewards[index] for index in indexes])
            return RewardedGroup(group, trajectories, rewards)

    def release(self, groups: Iterable[GroupId]) -> None:
        """Forget the trajectories of these groups in memory; the log keeps them."""
        with self._lock:
            self._appender.place_acknowledged()
            for group in groups:
                self._cache.drop(group)

    def check(self) -> None:
        """Assert the conservation law and every index, of the state and of the store."""
        with self._lock:
            self.state.check()
            self._cache.check()

    def _trajectory(self, group: Group, index: int) -> Trajectory:
        session = SessionId(group.submitted.group, index)
        cached = self._cache.get(session)
        if cached is not None:
            return cached
        batch, row = group.settled(index)
        assert batch.payload is not None, "what is not durable stays in the cache"
        row += batch.first_row
        return self._reader.trajectory(batch.payload, row=row, session=session)


def _open_group(group: Group) -> OpenGroup:
    number = group.submitted.group
    begun = {SessionId(number, i): Begun.of(some) for i, some in sorted(group.unfinished.items())}
    return OpenGroup(group.submitted, group.missing, begun)
