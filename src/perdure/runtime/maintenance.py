"""Changing the checkpoints of a run that nobody trains: claimed, and let go again."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from perdure.checkpoint import retention
from perdure.checkpoint.collector import (
    CollectionPlan,
    Collector,
    Leftovers,
    left_behind,
    plan_collection,
    reasons_to_stay,
)
from perdure.checkpoint.keep import Keep
from perdure.checkpoint.segments.store import SegmentStore
from perdure.checkpoint.tier.pins import Pins
from perdure.core.clock import Clock
from perdure.core.events import EventSink, ignore_events
from perdure.core.faults import FaultHook
from perdure.core.records import Checkpointed
from perdure.core.storage_api import Storage
from perdure.experience import (
    ClaimedRun,
    ExperienceState,
    ExperienceStore,
    claim_experience,
    read_experience,
)
from perdure.runtime.ledger import LogLedger
from perdure.runtime.log_reach import check_log_reaches_checkpoints

COMMIT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run lives and what its time, faults and reports are."""

    storage: Storage
    clock: Clock
    faults: FaultHook
    events: EventSink = ignore_events


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run that this process has claimed, with a log that it writes."""

    claimed: ClaimedRun
    store: ExperienceStore
    ledger: LogLedger


@contextlib.contextmanager
def held(place: Place, *, reason: str) -> Generator[HeldRun]:
    """Claim a run as an incarnation of its own that trains nothing; everything logged stays.

    Args:
        place: The run.
        reason: Why the incarnation ended, for its log.

    Raises:
        RunBusyError: A live process holds the run.
        DamagedError: Bytes that count are missing or wrong.
    """
    check_log_reaches_checkpoints(place.storage)
    claimed = claim_experience(
        place.storage, clock=place.clock, faults=place.faults, events=place.events
    )
    try:
        ledger = LogLedger(claimed.state)
        earlier = claimed.state.incarnations
        store = claimed.start(config_digest=earlier[-1].config_digest if earlier else "")
    except BaseException:
        claimed.release()
        raise
    ledger.start(store)
    try:
        yield HeldRun(claimed, store, ledger)
    finally:
        store.close(reason)


@dataclass(frozen=True, slots=True)
class Collected:
    """What collecting a run did, or would do.

    Attributes:
        plan: Which checkpoints stay and which go.
        leftovers: Cut-off saves, unnamed segments and unfinished deletions that go too.
    """

    plan: CollectionPlan
    leftovers: Leftovers


@dataclass(frozen=True, slots=True)
class Collecting:
    """What is asked of a collection.

    Attributes:
        last: Newest checkpoints that stay; None: as the run's own rules say, or 2.
        archival: Whether those stay that the rules keep for their step or a metric.
    """

    last: int | None = None
    archival: bool = True

    def rules(self, recorded: Keep | None) -> Keep:
        """What stays of a run with these rules of its own."""
        rules = recorded or Keep()
        if not self.archival:
            rules = Keep(rules.last)
        return rules if self.last is None else replace(rules, last=self.last)


def would_collect(
    storage: Storage, asked: Collecting, *, executor: Executor | None = None
) -> Collected:
    """What :func:`collect_run` would do now, without claiming or changing anything."""
    state, _ = read_experience(storage)
    plan = _plan(storage, LogLedger(state), asked, executor=executor)
    return Collected(plan, left_behind(storage, state.checkpoints, state.collected))


def why_kept_now(storage: Storage, state: ExperienceState) -> dict[str, tuple[str, ...]]:
    """Directory → why the checkpoint stays, by the run's own rules; no byte is verified.

    Empty if the run has no rules yet.
    """
    there = retention.present(storage, state.checkpoints)
    rules = retention.recorded_rules(storage, there)
    if rules is None:
        return {}
    metrics_of = retention.KnownMetrics(storage, LogLedger(state))
    return reasons_to_stay(there, rules, metrics_of=metrics_of, pinned=_pinned(storage, there))


def collect_run(place: Place, asked: Collecting, *, executor: Executor | None = None) -> Collected:
    """Delete checkpoints beyond the rules of retention, and what cut-off saves left.

    Args:
        place: The run.
        asked: What stays.
        executor: Checks several files at once.

    Raises:
        RunBusyError: A live process holds the run.
        DamagedError: The log is damaged, or no checkpoint is whole; then nothing is deleted.
        StorageError: The storage refused.
    """
    storage = place.storage
    # Before the claim: a run in which nothing may be deleted is left as it is.
    ledger = LogLedger(read_experience(storage)[0])
    before = [*ledger.committed()]
    plan = _plan(storage, ledger, asked, executor=executor)
    with held(place, reason="collected") as run:
        committed = [*run.ledger.committed()]
        if committed != before:
            plan = _plan(storage, run.ledger, asked, executor=executor)
        collected = run.store.state.collected
        leftovers = left_behind(storage, committed, collected)
        collector = Collector(
            storage,
            run.ledger,
            SegmentStore(storage, clock=place.clock, faults=place.faults, events=place.events),
            place.faults,
            place.events,
            timeout_s=COMMIT_TIMEOUT_S,
        )
        collector.sweep(collected)
        if plan.surplus:
            collector.collect(plan.surplus)
        return Collected(plan, leftovers)


def _plan(
    storage: Storage, ledger: LogLedger, asked: Collecting, *, executor: Executor | None
) -> CollectionPlan:
    committed = ledger.committed()
    recorded = retention.recorded_rules(storage, retention.present(storage, committed))
    return plan_collection(
        storage,
        committed,
        rules=asked.rules(recorded),
        metrics_of=retention.KnownMetrics(storage, ledger),
        pinned=_pinned(storage, committed),
        executor=executor,
    )


def _pinned(storage: Storage, committed: Sequence[Checkpointed]) -> set[str]:
    """Directories that must stay for the remote tier's sake."""
    names = [record.directory for record in committed]
    return set(names) - set(Pins(storage).let_go(names))
