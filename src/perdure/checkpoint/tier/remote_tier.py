"""The remote tier of a run: one thread that ships what is committed, and never holds up training.

Consumes what the ledger has committed and what the log has on disk. Waits for the store, within the
bounds of ``TierOptions``. Closing it leaves the pointer where it was or moves it; nothing between.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.tier.objects import (
    ObjectStore,
    RemoteUnavailableError,
    RetryingObjects,
    RetryPolicy,
)
from perdure.checkpoint.tier.options import TierContext
from perdure.checkpoint.tier.shipment import Shipment
from perdure.core.errors import FencedError, PerdureError, StorageError
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage

_ROUNDS = RetryPolicy(first_delay_s=1.0, longest_delay_s=60.0)
"""How long a round that failed waits for the next."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Where shipping stands.

    Attributes:
        checkpoint: Directory of the newest checkpoint that can be pulled; empty if there is none.
        uploading: Directory that is being stored now; empty if none is.
        behind_checkpoints: Committed checkpoints that are newer.
        behind_log_bytes: Bytes of the log that are not there.
        exposure_s: What losing this disk now would cost: the time since the log was complete
            there, 0 if it is. None while nothing was shipped.
        last_error: Why the last round failed; empty once one succeeds.
        fenced: The run goes on elsewhere; nothing is shipped any more.
        retries: Requests that had to be repeated.
    """

    checkpoint: str
    uploading: str
    behind_checkpoints: int
    behind_log_bytes: int
    exposure_s: float | None
    last_error: str
    fenced: bool
    retries: int


class RemoteTier:
    """Ships a run that this process has claimed. Thread-safe.

    A store that is slow, flaky or down is reported (``remote_failed``, :meth:`status`) and tried
    again, for as long as it takes. Any exception that is no refusal of store or disk is raised to
    the owner by :meth:`notify` or :meth:`close`.

    Args:
        storage: The run's storage.
        objects: The run's prefix.
        ledger: Says what is committed.
        incarnation: The claim under which is shipped.
        context: Time, faults, a listener, bounds. The thread waits on the clock.

    Raises:
        NothingToResumeError: There is no run.
        DamagedError: ``run.json`` is damaged.
    """

    def __init__(
        self,
        storage: Storage,
        objects: ObjectStore,
        *,
        ledger: CommitLedger,
        incarnation: IncarnationNumber,
        context: TierContext,
    ) -> None:
        self._options = context.options
        self._clock = clock = context.clock
        self._events = context.events
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        self._executor = ThreadPoolExecutor(self._options.parallel, thread_name_prefix="remote")
        self._objects = RetryingObjects(
            objects, policy=self._options.retry, clock=clock, stop=self._stop
        )
        self._shipment = Shipment(
            storage,
            self._objects,
            ledger=ledger,
            incarnation=incarnation,
            context=context,
            executor=self._executor,
            between=self._between_pieces,
        )
        self._segments = -1
        self._log_due_s = clock.monotonic_s()
        self._failures = 0
        self._last_error = ""
        self._fenced = False
        self._unexpected: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="remote-tier")
        self._thread.start()

    def notify(self) -> None:
        """A checkpoint was committed. Never waits."""
        self._raise_unexpected()
        self._wake.set()

    def let_go(self, directories: Sequence[str]) -> tuple[str, ...]:
        """Those of the directories that may be collected: not pointed to, not on their way."""
        return self._shipment.pins.let_go(directories)

    def status(self) -> TierStatus:
        """Where shipping stands, for people.

        Raises:
            StorageError: The local disk cannot be looked at.
        """
        head = self._shipment.head
        checkpoints, log_bytes = self._shipment.behind()
        shipped = head.sequence > 0 and head.shipped_wall_s > 0
        exposure_s = max(0.0, self._clock.wall_s() - head.shipped_wall_s) if log_bytes else 0.0
        return TierStatus(
            checkpoint=head.target.directory if head.target else "",
            uploading=head.uploading,
            behind_checkpoints=checkpoints,
            behind_log_bytes=log_bytes,
            exposure_s=exposure_s if shipped else None,
            last_error=self._last_error,
            fenced=self._fenced,
            retries=self._objects.retries,
        )

    def close(self, deadline_s: float | None = None) -> TierStatus:
        """Ship what is missing within ``close_timeout_s``, end the thread, say where it stands.

        Args:
            deadline_s: Nothing is waited for any longer, on the clock's monotonic scale.

        Raises:
            Exception: What a round did not expect.
        """
        self._closing = True
        self._wake.set()
        self._join(self._options.close_timeout_s, deadline_s)
        self._stop.set()
        self._wake.set()
        self._join(self._options.call_timeout_s, deadline_s)
        self._executor.shutdown(wait=not self._thread.is_alive(), cancel_futures=True)
        self._raise_unexpected()
        return self.status()

    def _join(self, timeout_s: float, deadline_s: float | None) -> None:
        if deadline_s is not None:
            timeout_s = min(timeout_s, max(0.0, deadline_s - self._clock.monotonic_s()))
        self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        """The thread: a round whenever one is due, until closed or fenced."""
        try:
            while not self._stop.is_set():
                self._wake.clear()
                closing = self._closing
                self._round(closing)
                if self._fenced or (closing and not self._last_error):
                    return
                self._pause()
        except BaseException as error:  # noqa: BLE001 - handed to the owner
            self._unexpected = error

    def _pause(self) -> None:
        if self._last_error:
            delay_s = _ROUNDS.delay_s(self._failures, key="round")
            self._clock.wait(self._wake, min(delay_s, 1.0) if self._closing else delay_s)
        elif not self._closing:
            self._clock.wait(self._wake, self._options.poll_s)

    def _round(self, closing: bool) -> None:
        try:
            self._ship(closing)
        except FencedError as error:
            self._fenced = True
            self._last_error = str(error)
            self._events("remote_fenced", {"error": str(error)})
            self._note_trouble()
        except (PerdureError, OSError) as error:
            self._failures += 1
            self._last_error = str(error) or repr(error)
            self._events("remote_failed", {"error": self._last_error})
            self._note_trouble()
        else:
            self._failures = 0
            self._last_error = ""
            self._note_trouble()

    def _note_trouble(self) -> None:
        # For people; the local disk may be what fails.
        with contextlib.suppress(StorageError):
            self._shipment.note_trouble(self._last_error)

    def _ship(self, closing: bool) -> None:
        if closing or self._log_is_due():
            self._ship_log()
        self._shipment.drop()
        while self._shipment.ship_checkpoint():
            pass

    def _ship_log(self) -> None:
        self._shipment.ship_log()
        self._segments = self._shipment.segments()
        self._log_due_s = self._clock.monotonic_s() + self._options.log_ship_s

    def _log_is_due(self) -> bool:
        """After ``log_ship_s``, and at once when a segment was finished."""
        if self._clock.monotonic_s() >= self._log_due_s:
            return True
        return self._shipment.segments() != self._segments

    def _between_pieces(self) -> None:
        if self._stop.is_set():
            raise RemoteUnavailableError(
                "the upload was interrupted by closing the tier",
                where=self._shipment.head.uploading,
                rule="the end of a run waits for close_timeout_s, no longer",
                way_out="perdure ckpt push goes on with it",
            )
        if self._log_is_due():
            self._ship_log()

    def _raise_unexpected(self) -> None:
        error, self._unexpected = self._unexpected, None
        if error is not None:
            raise error
