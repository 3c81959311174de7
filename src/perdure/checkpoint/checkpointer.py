"""The checkpointer of a run: stages in the caller's thread and hands over to the save pipeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from perdure.checkpoint import verification
from perdure.checkpoint.guard import TornCopyError
from perdure.checkpoint.ledger import CheckpointTier, CommitLedger
from perdure.checkpoint.manifest import StagedInfo
from perdure.checkpoint.options import CheckpointOptions
from perdure.checkpoint.pipeline import SaveError, SavePipeline
from perdure.checkpoint.registry import Registry
from perdure.checkpoint.restoration import Loading, restore
from perdure.checkpoint.snapshot import Stager
from perdure.checkpoint.team import Team, Turn, alone, require_agreement
from perdure.checkpoint.verification import Choice, SegmentCheck, VerifyReport
from perdure.core.clock import Clock
from perdure.core.components import is_segmented
from perdure.core.errors import ConfigError, StorageError
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import CheckpointName, IncarnationNumber
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage

MUST_TRIES = 5
"""How often a save that must succeed copies a state that keeps changing."""


@dataclass(slots=True)
class Checkpointer:
    """Saves and restores the registered components of one run.

    All methods are called from one thread, the owner's. Saves run one after another on
    ``executor``, a single thread by default. A save that the storage or the ledger refuses leaves
    the older checkpoints as they are, is reported (event ``checkpoint_failed``,
    :attr:`last_error`), and training goes on; any other exception of a save is raised to the owner
    by the next :meth:`stage`, :meth:`wait` or :meth:`close`.
    """

    storage: Storage
    registry: Registry = field(kw_only=True)
    ledger: CommitLedger = field(kw_only=True)
    clock: Clock = field(kw_only=True)
    faults: FaultHook = field(kw_only=True)
    events: EventSink = field(kw_only=True)
    options: CheckpointOptions = field(default=CheckpointOptions(), kw_only=True)
    executor: Executor | None = field(default=None, kw_only=True)
    team: Team = field(default_factory=alone, kw_only=True)
    """The ranks that save together; they stage the same checkpoints, and the first one commits."""

    skipped: int = field(default=0, init=False)
    """Saves that were due while all arenas were busy."""
    torn: int = field(default=0, init=False)
    """Copies that were thrown away because the state changed while it was copied."""

    _stager: Stager = field(init=False, repr=False)
    _pipeline: SavePipeline = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._stager = Stager(self.clock, arenas=self.options.arenas, place=self.team.place)
        self._pipeline = SavePipeline(
            self.storage,
            ledger=self.ledger,
            clock=self.clock,
            faults=self.faults,
            events=self.events,
            options=self.options,
            executor=self.executor,
        )

    @property
    def last_error(self) -> SaveError | None:
        """Why the newest save failed; None once a later one is committed."""
        return self._pipeline.last_error

    @property
    def failed(self) -> int:
        """Saves that were handed over and failed."""
        return self._pipeline.failed

    @property
    def arena_bytes(self) -> int:
        """Host memory held for staging now; at most ``arenas`` times a checkpoint's tensors."""
        return sum(arena.nbytes for arena in self._pipeline.arenas)

    def ship_to(self, tier: CheckpointTier) -> None:
        """Tell a tier of every commit from now on; called before the first save."""
        self._pipeline.tier = tier

    def reserve(self) -> int:
        """Take all memory that saving the components as they are now will ever need.

        Without it each arena is made by the first save that uses it, which blocks for longer.

        Returns:
            Bytes: :attr:`arena_bytes` from now on.

        Raises:
            ConfigError: A required component is missing, or a state cannot be stored.
        """
        self._pipeline.reserve(self._stager.size_of(self.registry.entries()))
        return self.arena_bytes

    @property
    def pending(self) -> int:
        """Saves that are handed over and not ended yet."""
        return self._pipeline.pending

    def stage(self, name: CheckpointName, *, info: StagedInfo, must: bool = False) -> bool:
        """Copy all components; become durable in the background.

        After return nothing of the caller's is referred to. With all arenas busy the save is
        skipped, counted and reported, never waited for; so is a copy that was torn by a change. One
        for which there is no memory has failed, and is reported.

        Args:
            name: A name never used before.
            info: The run at this moment.
            must: Wait for a free arena and for the commit, and raise what prevented it.

        Returns:
            False if nothing was handed over.

        Raises:
            ConfigError: The name is taken, a required component is missing, or a state cannot be
                stored.
            StorageError: ``must`` and the save failed or did not end in time, or the state changed
                during every copy.
        """
        turn = self.team.next_turn()
        reason = "the save was skipped there"
        saving = None
        try:
            saving = self._copied(name, info, must=must, turn=turn)
        except BaseException as error:
            reason = str(error) or repr(error)
            if must or not isinstance(error, StorageError):
                raise
            self._pipeline.report(name, error)
        finally:
            if saving is None:
                self._pipeline.decline(turn, reason)
        if saving is not None and must:
            self._await_commit(name.directory, saving)
        return saving is not None

    def store_segments(self, incarnation: IncarnationNumber) -> bool:
        """Store whole segments in the background, so that the next save finds little to write.

        Cheap when there is nothing to store; meant to be called often, at safe points. Never
        waits: while a save or an earlier call is in progress nothing happens.

        Args:
            incarnation: That of the run.

        Returns:
            Whether something is being stored.
        """
        self._pipeline.reap()
        if self._pipeline.pending:
            return False
        fresh = {
            entry.name: [one for one in entry.component.sealed() if one.stored is None]
            for entry in self.registry.entries()
            if is_segmented(entry.component)
        }
        parts = {name: segments for name, segments in fresh.items() if segments}
        if parts:
            self._pipeline.submit_segments(parts, incarnation)
        return bool(parts)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no save is pending; False if some still are after ``timeout_s``."""
        return self._pipeline.wait(timeout_s)

    def close(self, deadline_s: float | None = None) -> None:
        """Wait for pending saves, end the thread and the process, give the arenas back.

        Args:
            deadline_s: On the clock's monotonic scale; ``must_timeout_s`` from now by default.

        Raises:
            StorageError: A save did not end in time; it is given up.
            Exception: What a save did not expect; raised when everything is given back.
        """
        self._pipeline.close(deadline_s)

    def verify(self, directory: str) -> VerifyReport:
        """Check every byte of a checkpoint, and its manifest against the ledger."""
        digests = {record.directory: record.manifest_digest for record in self.ledger.committed()}
        digest = digests.get(directory, "")
        return verification.verify(self.storage, directory, manifest_digest=digest)

    def choose(
        self, committed: Sequence[Checkpointed], *, segments: SegmentCheck = "index"
    ) -> Choice:
        """The newest checkpoint that is whole; see :func:`~perdure.checkpoint.choose`."""
        choice = verification.choose(self.storage, committed, events=self.events, segments=segments)
        self._pipeline.verified.add(choice.directory)
        return choice

    def restore(
        self,
        choice: Choice,
        *,
        only: Collection[str] | None = None,
        cold: Collection[str] = (),
        allow_legacy: bool = False,
        regrouped: Collection[str] = (),
    ) -> None:
        """Load the components in place; see :func:`~perdure.checkpoint.restore`.

        Args:
            choice: The checkpoint, as chosen.
            only: Names to load; None = all.
            cold: Segmented components that start without their rows.
            allow_legacy: Whether pickles may be opened, which runs the code they name.
            regrouped: Components that every rank has a state of its own of and that may start
                without one, or leave one behind, because there are more or fewer ranks now.
        """
        entries = self.registry.entries()
        how = Loading(
            cold,
            self._pipeline.segments,
            self.registry.migrations,
            allow_legacy,
            self.team.place,
            regrouped,
        )
        restore(self.storage, choice, entries, faults=self.faults, only=only, how=how)
        self.events("restored", {"name": choice.directory, "step": choice.name.step})

    def sweep(self, collected: Sequence[str] = ()) -> tuple[str, ...]:
        """Delete what earlier incarnations left behind; returns the directories and segments.

        That is: directories the ledger lists as collected, and what saves that were cut off have
        left (directories with neither manifest nor commit, segments that no manifest names), which
        is listed as collected first. Call it after the run was claimed and before the first save.
        Anything with a manifest that was not collected stays.
        """
        return self._pipeline.collector.sweep(collected)

    def require_agreement(self) -> None:
        """Compare what should be the same on all ranks.

        Raises:
            ConfigError: A component differs; on every rank.
        """
        entries = self.registry.entries()
        require_agreement(self.team.together(lambda: dict(self._stager.agreement(entries))))

    def _copied(
        self, name: CheckpointName, info: StagedInfo, *, must: bool, turn: Turn
    ) -> Future[SaveError | None] | None:
        """Copy and hand over; None if it was skipped."""
        pipeline = self._pipeline
        pipeline.reap()
        self._refuse_used(name)
        if must and pipeline.busy and not self.wait(self.options.must_timeout_s):
            raise pipeline.too_slow(name.directory)
        if pipeline.busy:
            self.skipped += 1
            self.events("checkpoint_skipped", {"step": name.step, "reason": "all arenas are busy"})
            return None
        for _ in range(MUST_TRIES if must else 1):
            try:
                return self._hand_over(name, info, turn)
            except TornCopyError as torn:
                self.torn += 1
                reason = f"changed while it was copied: {', '.join(torn.args)}"
                self.events("checkpoint_skipped", {"step": name.step, "reason": reason})
        if must:
            raise StorageError(
                f"the state changed during each of {MUST_TRIES} copies",
                where=name.directory,
                rule="a torn copy is never saved",
                way_out="save between changes of the state",
            )
        return None

    def _refuse_used(self, name: CheckpointName) -> None:
        if self._pipeline.is_used(name.directory):
            raise ConfigError(
                "a checkpoint of this name exists",
                where=name.directory,
                rule="a checkpoint is never overwritten",
                way_out="save under another step",
            )

    def _hand_over(
        self, name: CheckpointName, info: StagedInfo, turn: Turn
    ) -> Future[SaveError | None]:
        started_s = self.clock.monotonic_s()
        entries = self.registry.entries()
        arena = self._pipeline.take_arena()
        try:
            snapshot = self._stager.stage(name, info=info, entries=entries, arena=arena)
            blocked_ms = (self.clock.monotonic_s() - started_s) * 1e3
            self.events(
                "checkpoint_staged",
                {"step": name.step, "blocked_ms": blocked_ms, "bytes": snapshot.bytes},
            )
            self.faults.reach(FaultPoint.CHECKPOINT_STAGED)
        except BaseException:
            self._pipeline.give_back(arena)
            raise
        return self._pipeline.submit(snapshot, turn)

    def _await_commit(self, directory: str, saving: Future[SaveError | None]) -> None:
        if not self.wait(self.options.must_timeout_s):
            raise self._pipeline.too_slow(directory)
        error = saving.result()
        if isinstance(error, OSError):
            raise StorageError(
                f"could not be saved ({error!r})",
                where=directory,
                rule="what was asked for with must is committed, or this is raised",
                way_out="look at the disk; the checkpoint before it stays",
            ) from error
        if error is not None:
            raise error
