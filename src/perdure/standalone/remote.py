"""The remote tier of a script's run: fetched to an empty disk, shipped to while it goes on."""

from __future__ import annotations

from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.tier import (
    ObjectStore,
    RemoteTier,
    TierContext,
    TierStatus,
    open_objects,
    pull,
)
from perdure.core.clock import Clock
from perdure.core.errors import NothingToResumeError
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage
from perdure.experience.claims import RUN_FILE


class Remote:
    """Where a run is shipped to.

    Args:
        where: ``s3://bucket/prefix``, one prefix per run, or an object store.

    Raises:
        ConfigError: Not such an address.
    """

    def __init__(
        self, where: str | ObjectStore, *, clock: Clock, faults: FaultHook, events: EventSink
    ) -> None:
        self._objects = open_objects(where) if isinstance(where, str) else where
        self._context = TierContext(clock, events=events, faults=faults)
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

    def close(self) -> None:
        """Ship what is missing, within a bound, and end the thread.

        Raises:
            Exception: What shipping did not expect. A store that refuses is only reported.
        """
        if self._tier is not None:
            self._tier.close()
