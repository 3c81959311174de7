"""The remote tier of a run: fetched to an empty disk, shipped to while the run goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perdure.checkpoint.keep import Keep
from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.tier import (
    ObjectStore,
    RemoteTier,
    RetryingObjects,
    TierContext,
    TierOptions,
    TierStatus,
    open_objects,
    pull,
    read_head,
)
from perdure.core.clock import Clock
from perdure.core.errors import (
    ConfigError,
    DamagedError,
    FutureFormatError,
    NothingToResumeError,
    StorageError,
)
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage
from perdure.experience.claims import RUN_FILE

_NEWEST = Keep()
REMOTE_LAST = 2
"""Newest checkpoints that stay in the remote tier."""


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """What is shipped where.

    Attributes:
        where: ``s3://bucket/prefix`` or ``file:///path``, one for each run; or an object store.
        keep: Rules of the run; of the newest, ``last`` stay in the remote tier.
        last: See ``keep``.
        log_ship_s: Longest time between two shipments of the log's tail.
        close_timeout_s: How long the end of the run waits for what is not shipped yet.
    """

    where: str | ObjectStore
    keep: Keep = _NEWEST
    last: int = REMOTE_LAST
    log_ship_s: float = 30.0
    close_timeout_s: float = 60.0

    @property
    def options(self) -> TierOptions:
        """Bounds of the tier."""
        return TierOptions(
            keep=replace(self.keep, last=self.last),
            log_ship_s=self.log_ship_s,
            close_timeout_s=self.close_timeout_s,
        )


class Remote:
    """Where a run is shipped to.

    Raises:
        ConfigError: The plan does not name such a place.
    """

    def __init__(
        self, plan: RemotePlan, *, clock: Clock, faults: FaultHook, events: EventSink
    ) -> None:
        where = plan.where
        self._objects = open_objects(where) if isinstance(where, str) else where
        self._address = where if isinstance(where, str) else ""
        self._context = TierContext(
            clock, options=plan.options, events=events, faults=faults, address=self._address
        )
        self._tier: RemoteTier | None = None

    def fetch_if_absent(self, storage: Storage) -> None:
        """Bring the run back if this directory holds none and the remote tier does.

        Raises:
            RemoteUnavailableError: The store does not answer; it may hold the run.
            DamagedError: What it holds cannot be brought back whole.
        """
        if storage.exists(RUN_FILE):
            return
        # What a pull that was cut short has left is no run yet: pulling again goes on.
        try:
            pull(storage, self._objects, context=self._context)
        except NothingToResumeError:
            return

    def require_empty(self) -> None:
        """Refuse a place that holds a run: a new one would never be shipped there.

        Raises:
            ConfigError: There is a run.
            RemoteUnavailableError: The store does not answer; it may hold one.
        """
        retry, clock = self._context.options.retry, self._context.clock
        try:
            held = read_head(RetryingObjects(self._objects, policy=retry, clock=clock)).run_id
        except NothingToResumeError:
            return
        except DamagedError as error:
            held = f"that cannot be read ({error.what})"
        raise ConfigError(
            f"the remote tier holds the run {held}",
            where=self._address,
            rule="each run is shipped into a prefix of its own",
            way_out=f"bring it back with `perdure ckpt pull {self._address} RUN` and resume it,"
            " or name another prefix",
        )

    def require_own(self, run_id: str) -> None:
        """Refuse a place that holds another run, before this one goes on without being shipped.

        A store that does not answer, or whose pointer is damaged, keeps nobody from training: it
        is reported when shipping begins.

        Raises:
            ConfigError: There is another run.
        """
        try:
            held = read_head(self._objects).run_id
        except (NothingToResumeError, DamagedError, FutureFormatError, StorageError):
            return
        if held != run_id:
            raise ConfigError(
                f"the remote tier holds the run {held}, the directory is run {run_id}",
                where=self._address,
                rule="each run is shipped into a prefix of its own",
                way_out="name another prefix, or the directory of that run",
            )

    def start(
        self, storage: Storage, *, ledger: CommitLedger, incarnation: IncarnationNumber
    ) -> RemoteTier:
        """Begin to ship, under this incarnation; what was shipped under an earlier one is there."""
        self._tier = RemoteTier(
            storage, self._objects, ledger=ledger, incarnation=incarnation, context=self._context
        )
        return self._tier

    def status(self) -> TierStatus | None:
        """Where shipping stands; None before it began."""
        return self._tier.status() if self._tier is not None else None

    def close(self, deadline_s: float | None = None) -> None:
        """Ship what is missing, within a bound, and end the thread.

        Args:
            deadline_s: A nearer bound, on the clock's monotonic scale.

        Raises:
            Exception: What shipping did not expect. A store that refuses is only reported.
        """
        if self._tier is not None:
            self._tier.close(deadline_s)
