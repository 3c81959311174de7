"""Claiming a run's experience, or reading it without a claim."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Mapping

from perdure.core import sealed_json
from perdure.core.clock import Clock
from perdure.core.errors import PerdureError
from perdure.core.events import EventSink, ignore_events
from perdure.core.faults import FaultHook
from perdure.core.ids import IncarnationNumber, LogPosition, PolicyVersion, UpdateId
from perdure.core.records import IncarnationStarted
from perdure.core.storage_api import Storage
from perdure.experience.claims import (
    Claim,
    RunInfo,
    claim,
    highest_incarnation,
    newest_started,
    read_run,
)
from perdure.experience.entries import Entry
from perdure.experience.fold import fold, rewound
from perdure.experience.reader import LineageLog, LogReport, read_lineage
from perdure.experience.scan import Extent
from perdure.experience.seals import FORMAT, seal_path
from perdure.experience.state import ExperienceState
from perdure.experience.store import ExperienceStore
from perdure.experience.writer import LogOptions, LogWriter

_CACHE_BYTES = 256 * 2**20
_START_TIMEOUT_S = 120.0
_MANY_OBJECTS = 100_000


class ClaimedRun:
    """A run that nobody else may write any more and that this process does not write yet.

    Attributes:
        state: The fold over the kept lineage.
        report: What reading the log took and what was cut.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        claim: Claim,
        log: LineageLog,
        state: ExperienceState,
        open_writer: Callable[[], LogWriter],
    ) -> None:
        self.state = state
        self.report = log.report
        self._storage = storage
        self._claim = claim
        self._records = log.records
        self._open_writer = open_writer
        self._started = False

    @property
    def run(self) -> RunInfo:
        """What ``run.json`` says."""
        return self._claim.run

    @property
    def incarnation(self) -> IncarnationNumber:
        return self._claim.incarnation

    @property
    def parent(self) -> IncarnationNumber:
        """The incarnation this one goes on from; 0 in a fresh run."""
        return self._claim.parent

    def start(
        self,
        *,
        base_checkpoint: str = "",
        base_position: LogPosition | None = None,
        redo_until: UpdateId | None = None,
        config_digest: str = "",
        cache_bytes: int = _CACHE_BYTES,
    ) -> ExperienceStore:
        """Begin to write: log which lineage this incarnation goes on from, durably. Once.

        Args:
            base_checkpoint: Directory of the checkpoint that was loaded.
            base_position: Decisions beyond it are void and their groups available again (a rewind,
                or redo turned off); None keeps everything.
            redo_until: Last update that will be trained again.
            config_digest: Digest of the configuration from here on.
            cache_bytes: Trajectories kept in memory beside the log, as bytes of arrays.

        Raises:
            FencedError: Somebody else claimed the run meanwhile.
            StorageError: The record could not be made durable.
        """
        assert not self._started, "an incarnation starts once"
        self._started = True
        record = IncarnationStarted(
            incarnation=self.incarnation,
            parent=self.parent,
            base_checkpoint=base_checkpoint,
            base_position=base_position,
            redo_until=redo_until,
            config_digest=config_digest,
        )
        if base_position is not None:
            used = PolicyVersion(self.state.next_version - 1)
            self.state = fold(rewound(self._records, base_position), used_version=used)
        self._records = ()
        writer = self._open_writer()
        entry = Entry(record)
        try:
            writer.append([entry])
            writer.flush(_START_TIMEOUT_S)
        except BaseException:
            # Closing raises the same failure again.
            with contextlib.suppress(PerdureError):
                writer.close("not started")
            raise
        self.state.apply(entry.position, record)
        return ExperienceStore(
            self._storage,
            claim=self._claim,
            state=self.state,
            writer=writer,
            cache_bytes=cache_bytes,
        )

    def release(self) -> None:
        """Let the run go; may be repeated, and is harmless after the store is closed."""
        self._claim.release()


def claim_experience(
    storage: Storage,
    *,
    clock: Clock,
    faults: FaultHook,
    events: EventSink = ignore_events,
    take_over: bool = False,
    options: LogOptions | None = None,
) -> ClaimedRun:
    """Claim a run, fencing everyone who wrote it before, and fold its kept lineage.

    Raises:
        NothingToResumeError: There is no run; ``create_run`` makes one.
        RunBusyError: A live process holds the run and ``take_over`` is False.
        DamagedError: Bytes that count are missing or wrong. Nothing is skipped.
        LifecycleError: The log tells a history that cannot have happened.
        StorageError: The storage refused.
    """
    run_id = read_run(storage).run_id
    claimed = claim(storage, run_id=run_id, clock=clock, faults=faults, take_over=take_over)
    try:
        log, state = _read(storage, claimed.parent, verified=claimed.sealed)
    except BaseException:
        claimed.release()
        raise
    _announce(storage, claimed, log.report, events=events)

    def open_writer() -> LogWriter:
        return LogWriter(
            storage, claim=claimed, clock=clock, faults=faults, options=options, events=events
        )

    return ClaimedRun(storage, claim=claimed, log=log, state=state, open_writer=open_writer)


def read_experience(storage: Storage) -> tuple[ExperienceState, LogReport]:
    """The state of a run as its files tell it now, without claiming or changing anything.

    Beside a live writer it is the state at one moment during the call.

    Raises:
        NothingToResumeError: There is no run here.
        DamagedError: Bytes that count are missing or wrong.
        LifecycleError: The log tells a history that cannot have happened.
    """
    run_id = read_run(storage).run_id
    head = newest_started(storage, run_id=run_id, below=highest_incarnation(storage) + 1)
    log, state = _read(storage, head, verified={})
    return state, log.report


def _read(
    storage: Storage, head: IncarnationNumber, *, verified: Mapping[IncarnationNumber, Extent]
) -> tuple[LineageLog, ExperienceState]:
    with _collector_paused():
        log = read_lineage(storage, head, verified=verified)
        return log, fold(log.records, used_version=log.used_version)


@contextlib.contextmanager
def _collector_paused() -> Generator[None]:
    """Reading a log makes a lot of objects that stay; looking at them for garbage takes as long.

    If they are many, they count as old afterwards: they are looked at when all objects are, not at
    once. So is what was garbage by then, which a process that reads short logs again and again
    would be left with.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] >= _MANY_OBJECTS and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


def _announce(storage: Storage, claimed: Claim, report: LogReport, *, events: EventSink) -> None:
    """Say who was claimed from and what that cut; what earlier claims cut was said by them."""
    fields: dict[str, object] = {
        "incarnation": claimed.incarnation,
        "parent": claimed.parent,
        "took_over": claimed.took_over,
    }
    events("claimed", fields)
    why = "fenced" if claimed.took_over else "unfinished"
    for tail in report.tails:
        if not _was_sealed_by(storage, tail.name.incarnation, claimed.incarnation):
            continue
        cut: dict[str, object] = {
            "incarnation": tail.name.incarnation,
            "stream": tail.name.stream.value,
            "segment": tail.name.segment,
            "bytes": tail.size,
            "why": why,
        }
        events("log_tail_cut", cut)


def _was_sealed_by(storage: Storage, sealed: IncarnationNumber, sealer: IncarnationNumber) -> bool:
    path = seal_path(sealed)
    fields = ("sealed_by",)
    value = sealed_json.decode(storage.read(path), where=path, newest_format=FORMAT, fields=fields)
    return value["sealed_by"] == sealer
