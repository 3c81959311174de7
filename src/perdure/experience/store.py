"""The experience of a run that is being written: the fold in memory, the log on disk.

Every method validates its transition against the fold at once, then appends to the log; what it
returns resolves when the record is acknowledged, and gives the end of the log as it is then.
Repeating an append whose key is in the kept lineage changes nothing, so a step that is trained
again calls the same methods. The first failure of the log is final: every later call raises it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from perdure.core.errors import FencedError, LifecycleError, StorageError
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
    LogPosition,
    SessionId,
    UpdateId,
)
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.core.records import (
    Checkpointed,
    Closed,
    Collect,
    ControlRecord,
    Evicted,
    IncarnationStarted,
    Refilled,
    SegmentOpened,
    Taken,
)
from perdure.core.storage_api import Storage
from perdure.core.trajectories import PartialDelta, Trajectory
from perdure.experience.appender import Appender
from perdure.experience.claims import Claim, RunInfo
from perdure.experience.columns import LooseTrajectories
from perdure.experience.commit import require_unfenced
from perdure.experience.continuation import require_loggable_result
from perdure.experience.finished import (
    FinishedSession,
    PackedSessions,
    pack_sessions,
    session_entries,
)
from perdure.experience.held import HeldExperience
from perdure.experience.packed import PackedTrajectories
from perdure.experience.partials import partial_entries, require_loggable_deltas
from perdure.experience.payloads import PayloadReader
from perdure.experience.state import ExperienceState
from perdure.experience.trajectory_cache import TrajectoryCache
from perdure.experience.writer import LogWriter

_NOT_BY_HAND = (SegmentOpened, IncarnationStarted, Closed, SessionsDone, Partials, ToolResult)


class ExperienceStore(HeldExperience):
    """The one writer of a run's experience, made by ``ClaimedRun.start``. Thread-safe."""

    def __init__(
        self,
        storage: Storage,
        *,
        claim: Claim,
        state: ExperienceState,
        writer: LogWriter,
        cache_bytes: int,
    ) -> None:
        cache = TrajectoryCache(cache_bytes)
        appender = Appender(state, writer, cache=cache)
        super().__init__(state, appender=appender, reader=PayloadReader(storage), cache=cache)
        self._storage = storage
        self._claim = claim
        self._writer = writer

    @property
    def run(self) -> RunInfo:
        """What ``run.json`` says."""
        return self._claim.run

    @property
    def incarnation(self) -> IncarnationNumber:
        return self._claim.incarnation

    @property
    def is_highest(self) -> bool:
        """Whether nobody has claimed the run since; False also when that cannot be seen."""
        try:
            require_unfenced(self._storage, self.incarnation)
        except (FencedError, StorageError):
            return False
        return True

    @property
    def parent(self) -> IncarnationNumber:
        """The incarnation this one goes on from; 0 in a fresh run."""
        return self._claim.parent

    @property
    def position(self) -> LogPosition:
        """End of the last acknowledged control record: what a checkpoint staged now refers to."""
        return self._writer.position

    def submit(self, records: Sequence[Submitted]) -> Future[LogPosition]:
        """Let prompt groups in, with the next group ids and data indexes in order.

        Raises:
            LifecycleError: Out of order; those before it count.
            TypeError, ValueError: A record cannot be encoded; nothing was logged.
        """
        self._appender.wait_for_room()
        return self._appender.append(records)

    def start_sessions(self, sessions: Iterable[SessionId]) -> None:
        """Note that sessions run. Volatile: a restart finds their groups pending.

        Raises:
            LifecycleError: A session is unknown or its group is terminal.
        """
        with self._lock:
            self._appender.require_healthy()
            for session in sessions:
                self.state.table.progress(session)

    def session_done(
        self, trajectory: Trajectory, *, reward: float, parts: Mapping[str, float] | None = None
    ) -> Future[LogPosition]:
        """Log one session's tokens and its settled reward: :meth:`sessions_done` with one."""
        return self.sessions_done([FinishedSession(trajectory, reward, parts or {})])

    def sessions_done(
        self, sessions: Sequence[FinishedSession], *, settled: Sequence[GroupSettled] = ()
    ) -> Future[LogPosition]:
        """Log the tokens and settled rewards of sessions, of any groups, in one batch.

        ``settled`` makes groups terminal along with them.

        Raises:
            TrainingError: A reward is not finite; nothing was logged.
            TypeError, ValueError: An array, a number or a part is not what a record can hold;
                nothing was logged.
            LifecycleError: A session is unknown or its group is terminal. Of more than
                ``MAX_SESSIONS``, or more than ``MAX_BYTES`` of arrays, those in front may count.
        """
        packed = pack_sessions(sessions) if sessions else None
        self._appender.wait_for_room()
        with self._lock:
            if packed is not None and self._have_settled(packed):
                fresh: dict[SessionId, FinishedSession] = {}
                for session in sessions:
                    if not self.state.table.is_settled(session.trajectory.session):
                        fresh.setdefault(session.trajectory.session, session)
                packed = pack_sessions(list(fresh.values())) if fresh else None
            entries = [] if packed is None else session_entries(packed)
            return self._appender.append_sessions(entries, settled=settled)

    def packed_sessions_done(
        self, sessions: PackedSessions[PackedTrajectories], *, settled: Sequence[GroupSettled] = ()
    ) -> Future[LogPosition]:
        """As :meth:`sessions_done`, of sessions that were checked when they were packed."""
        self._appender.wait_for_room()
        with self._lock:
            if not self._have_settled(sessions):
                return self._appender.append_sessions(session_entries(sessions), settled=settled)
        return self.sessions_done(sessions.unpacked(), settled=settled)

    def partials(self, deltas: Sequence[PartialDelta]) -> Future[LogPosition]:
        """Log the newest tokens of unfinished sessions, of any groups, in one batch.

        What the log has already is compared and left out; so is a session that is done. A session
        goes on from the last token of this that is acknowledged.

        Raises:
            LifecycleError: A session is unknown, its group is terminal, or tokens leave a gap, say
                something else than the log, or are of an attempt that was given up.
            DamagedError: What the log has cannot be read for the comparison.
            TypeError, ValueError: An array or a number is not what a record can hold, or a session
                occurs twice; nothing was logged.
        """
        require_loggable_deltas(deltas)
        self._appender.wait_for_room()
        with self._lock:
            self._appender.require_healthy()
            return self._appender.append_partials(
                partial_entries(self._continuations.lacking(deltas))
            )

    def tool_result(self, record: ToolResult) -> Future[LogPosition]:
        """Journal the result of a tool call; use it only when the future has resolved.

        Raises:
            LifecycleError: The session is unknown or done, its group is terminal, the call has
                another result in the log, or its attempt is not the session's newest.
            TypeError, ValueError: A field is not what a record can hold, or the result is longer
                than ``MAX_RESULT_CHARACTERS``; nothing was logged.
        """
        require_loggable_result(record)
        self._appender.wait_for_room()
        return self._appender.append([record])

    def restart_session(
        self, session: SessionId, *, attempt: int, reason: str
    ) -> Future[LogPosition]:
        """Let an unfinished session start again from its prompt.

        The tokens and tool results of its earlier attempts stay in the log; nobody goes on from
        them. ``attempt`` is the one that begins, the last one plus 1.

        Raises:
            LifecycleError: The session is unknown or done, its group is terminal, or another
                attempt is the next.
        """
        return self.append(SessionRestarted(session, attempt, reason))

    def settle(
        self, group: GroupId, outcome: GroupOutcome, reason: str = ""
    ) -> Future[LogPosition]:
        """Make a group terminal. It may finish only with all its sessions done.

        Raises:
            LifecycleError: It is unknown, terminal, or to finish with sessions missing.
        """
        return self.append(GroupSettled(group, outcome, reason))

    def take(
        self,
        update: UpdateId,
        *,
        groups: Sequence[GroupId],
        config_digest: str,
        reference_digest: str = "",
        tokenizer_digest: str = "",
    ) -> Future[LogPosition]:
        """Log the batch of a local update; train it only when the future has resolved.

        Raises:
            LifecycleError: Not the next update, or not the oldest finished groups in order.
        """
        return self.append(
            Taken(
                update,
                tuple(groups),
                config_digest,
                reference_digest=reference_digest,
                tokenizer_digest=tokenizer_digest,
            )
        )

    def evict(
        self, evictions: Iterable[tuple[GroupId, EvictionReason]], *, global_step: GlobalStep
    ) -> Future[LogPosition]:
        """Let groups go without training them, in one batch; each is one prompt owed.

        Raises:
            LifecycleError: A group is unknown, still open or trained; those before it count.
        """
        return self.append_all([Evicted(group, why, global_step) for group, why in evictions])

    def refill(self, records: Sequence[Submitted]) -> Future[LogPosition]:
        """Submit groups that pay for the oldest evictions without a refill, one for one.

        Raises:
            LifecycleError: More prompts than are owed.
        """
        self._appender.wait_for_room()
        with self._lock:
            owed = list(self.state.table.owed)
            if len(records) > len(owed):
                raise LifecycleError(
                    f"{len(records)} prompts refill {len(owed)} evictions",
                    where="refill",
                    rule="every eviction is refilled exactly once",
                    way_out="submit the others as prompts of their step",
                )
            pairs: list[ControlRecord] = []
            for record, replaces in zip(records, owed, strict=False):
                pairs += [record, Refilled(record.group, replaces)]
            return self._appender.append(pairs)

    def append(self, record: ControlRecord) -> Future[LogPosition]:
        """Log a record that has no method of its own (step_done, redone, published, …)."""
        return self.append_all([record])

    def append_all(self, records: Sequence[ControlRecord]) -> Future[LogPosition]:
        """Log records in one batch: after a crash all of them are there or none.

        Raises:
            LifecycleError: One is illegal here; those before it count.
            TypeError, ValueError: One cannot be encoded; nothing was logged.
        """
        for record in records:
            assert not isinstance(record, _NOT_BY_HAND), f"{record.key()} is not made by hand"
        self._appender.wait_for_room()
        return self._appender.append(records)

    def commit(self, record: Checkpointed) -> Future[LogPosition]:
        """Commit a checkpoint whose files are durable."""
        return self.append(record)

    def collect(self, record: Collect) -> Future[LogPosition]:
        """Announce that checkpoints are going to be deleted."""
        return self.append(record)

    def urge(self) -> Future[LogPosition]:
        """Commit without lingering; resolves when everything appended so far is acknowledged."""
        return self._appender.urge()

    def commit_all(self) -> Future[LogPosition]:
        """As :meth:`urge`; a log without a thread of its own is committed before this returns."""
        return self._appender.commit_all()

    def note_acknowledged(self) -> None:
        """Place what has become durable since.

        Raises:
            FencedError, StorageError: The log has failed.
        """
        self._appender.place_acknowledged()
        self._appender.require_healthy()

    def flush(self, timeout_s: float) -> None:
        """Return when everything appended so far is acknowledged.

        Raises:
            FencedError, StorageError: The log failed, or ``timeout_s`` have passed.
        """
        self._writer.flush(timeout_s)
        self.note_acknowledged()

    def close(self, reason: str) -> None:
        """Make everything durable, end the log in an orderly way and let the run go.

        Raises:
            FencedError, StorageError: The log had failed, or fails now. It is closed all the same.
        """
        try:
            self._writer.close(reason)
        finally:
            self._claim.release()
            self._appender.place_acknowledged()

    def _have_settled(
        self, sessions: PackedSessions[LooseTrajectories] | PackedSessions[PackedTrajectories]
    ) -> bool:
        """Whether any of them is settled, or would be by an earlier one of them."""
        return self.state.table.any_settled(sessions.trajectories.columns.fields["sessions"])
