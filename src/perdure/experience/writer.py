"""The log writer: a bounded queue in front of group commit, in a thread of its own or inline."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from perdure.core.clock import Clock
from perdure.core.errors import StorageError
from perdure.core.events import EventSink, ignore_events
from perdure.core.faults import FaultHook, FaultPoint
from perdure.core.ids import LogPosition
from perdure.core.records import Closed, IncarnationStarted
from perdure.core.storage_api import Storage
from perdure.experience.claims import Claim
from perdure.experience.commit import CommitLimits, Committer
from perdure.experience.entries import (
    Entry,
    PackedEntries,
    PreparedEntry,
    encode_large,
    pack_entries,
    prepare_entry,
)
from perdure.experience.record_memory import MemoryBlocks, RecordMemory

_IDLE_S = 0.5
_MOST_TOGETHER = 8
"""A commit may grow to so many ``commit_bytes``. Each gives the interpreter up at least six
times, however much is in it, and callers that compute give it back only after a switch interval
(5 ms)."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How the log is written.

    Attributes:
        segment_bytes: A segment that has reached this size is closed between batches.
        linger_s: How long a commit waits for more appends, unless it is urged.
        commit_bytes: A commit waits no longer once so much is pending. It takes little more than
            eight times as much, if that has come together behind the one before.
        max_pending_bytes: Above this, ``append`` waits until a commit has made room.
        stall_timeout_s: Longest such wait, and the longest wait for the last commit on closing.
        tries: How often a batch is tried, each time in a new segment.
        threaded: Commit in an owned thread; False: in ``flush``, in the caller's.
    """

    segment_bytes: int = 64 * 2**20
    linger_s: float = 0.02
    commit_bytes: int = 4 * 2**20
    max_pending_bytes: int = 256 * 2**20
    stall_timeout_s: float = 120.0
    tries: int = 3
    threaded: bool = True

    def __post_init__(self) -> None:
        assert self.tries >= 1
        assert self.segment_bytes > 0


class _Batch:
    """What is committed together, and the one future of all its appends."""

    def __init__(self, blocks: MemoryBlocks) -> None:
        self.entries: list[PreparedEntry] = []
        self.size = 0
        self.memory = RecordMemory(blocks)
        self.future: Future[LogPosition] = Future()
        # Cancelling a wait must not cancel the appends of others.
        self.future.set_running_or_notify_cancel()


class LogWriter:
    """Appends to the log of one incarnation. Thread-safe.

    The first record must be ``IncarnationStarted``. An append is atomic: all its records become
    visible or none. Appends become durable in the order in which they were made. The first
    failure is final: it reaches every pending future and every later call.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        claim: Claim,
        clock: Clock,
        faults: FaultHook,
        options: LogOptions | None = None,
        events: EventSink = ignore_events,
    ) -> None:
        self._options = options or LogOptions()
        self._clock = clock
        self._faults = faults
        limits = CommitLimits(self._options.segment_bytes, self._options.tries)
        self._committer = Committer(
            storage, claim=claim, clock=clock, faults=faults, events=events, limits=limits
        )
        self._blocks = MemoryBlocks()
        self._incarnation = claim.incarnation
        self._position = LogPosition(claim.incarnation, 0, 0)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._urged = threading.Event()
        self._waiting: deque[_Batch] = deque()
        self._batch_of: dict[str, _Batch] = {}
        """Key of a record that is pending → its batch."""
        self._committing = _Batch(self._blocks)
        self._pending_bytes = 0
        self._last = self._committing
        self._started = False
        self._closing = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if self._options.threaded:
            self._thread = threading.Thread(target=self._run, name="perdure-log")
            self._thread.start()

    @property
    def position(self) -> LogPosition:
        """End of the last acknowledged control record."""
        return self._position

    @property
    def error(self) -> BaseException | None:
        """What ended the log, if it has failed."""
        return self._error

    def append(self, entries: Sequence[Entry]) -> Future[LogPosition]:
        """Queue records; the future resolves when they are acknowledged.

        It gives the end of the last acknowledged control record and is shared by all appends of
        one commit. A record whose key is still pending is not queued again; the future then covers
        the earlier one. Waits only if more than ``max_pending_bytes`` are pending.

        Raises:
            FencedError: A newer incarnation has claimed the run.
            StorageError: The log cannot be written.
            TypeError, ValueError: A record cannot be encoded; nothing was queued.
        """
        prepared = [prepare_entry(entry) for entry in entries]
        self.wait_for_room(sum([item.size for item in prepared]))
        return self.append_prepared(prepared)

    def append_prepared(self, prepared: Sequence[PreparedEntry]) -> Future[LogPosition]:
        """As :meth:`append`, of entries that are prepared; never waits."""
        assert prepared, "an append has entries"
        with self._lock:
            self._require_open()
            if not self._started:
                first = prepared[0].entry.control
                assert isinstance(first, IncarnationStarted), "an incarnation starts first"
                self._started = True
            fresh = [item for item in prepared if item.key not in self._batch_of]
            if not fresh:
                # Batches are acknowledged in order: the newest covers the ones before it.
                pending = (self._committing, *self._waiting)
                batches = [self._batch_of[item.key] for item in prepared]
                return next(batch for batch in reversed(pending) if batch in batches).future
            return self._enqueue(fresh)

    def _enqueue(self, fresh: list[PreparedEntry]) -> Future[LogPosition]:
        size = sum([item.size for item in fresh])
        commit_bytes = self._options.commit_bytes
        full = not self._waiting or self._waiting[-1].size >= _MOST_TOGETHER * commit_bytes
        batch = _Batch(self._blocks) if full else self._waiting[-1]
        try:
            # Here the arrays are still in the caches of the one who made them.
            encoded = [encode_large(item, batch.memory) for item in fresh]
        except BaseException:
            if full:
                batch.memory.take_back()
            raise
        if full:
            self._waiting.append(batch)
            self._changed.notify_all()
        batch.entries += encoded
        for item in encoded:
            if item.is_encoded:
                # The garbage collector need not look at the columns while they wait.
                item.entry.trajectories = None
        self._batch_of.update(dict.fromkeys([item.key for item in fresh], batch))
        batch.size += size
        self._pending_bytes += size
        self._last = batch
        if batch.size >= commit_bytes:
            self._urged.set()
        return batch.future

    def wait_for_room(self, size: int = 1) -> None:
        """Wait until ``size`` more bytes fit; anything fits an empty queue.

        Hold no lock that the callback of a future may need.

        Raises:
            FencedError, StorageError: As :meth:`append`; also if it takes ``stall_timeout_s``.
        """
        if self._fits(size):
            return
        self.commit_all()
        if self._thread is None:
            return
        timeout_s = self._options.stall_timeout_s
        with self._lock:
            if not self._changed.wait_for(lambda: self._fits(size), timeout_s):
                raise self._stalled(timeout_s)
            self._require_open()

    def urge(self) -> None:
        """Commit what is pending without lingering; in inline mode with the next flush."""
        self._urged.set()

    def commit_all(self) -> None:
        """Commit what is pending without lingering: in the thread, or here in inline mode."""
        if self._thread is None:
            self._commit_waiting()
        self.urge()

    def flush(self, timeout_s: float) -> None:
        """Return when everything appended so far is acknowledged. Inline mode commits here.

        Raises:
            FencedError, StorageError: As :meth:`append`; also if ``timeout_s`` have passed.
        """
        self.commit_all()
        last = self._last
        if last.entries:
            try:
                last.future.result(timeout_s)
            except TimeoutError as error:
                raise self._stalled(timeout_s) from error
        self._require_healthy()

    def close(self, reason: str) -> None:
        """Write ``Closed``, wait for it, seal this incarnation's log, end the thread.

        Raises:
            FencedError, StorageError: The log had failed, or fails now. It is closed all the same.
        """
        if self._closed:
            return
        try:
            if self._started and self._error is None:
                self.append([Entry(Closed(self._incarnation, reason))])
                self.flush(self._options.stall_timeout_s)
        finally:
            self._end_thread()
        self._require_healthy()
        if self._started:
            self._committer.seal()

    def _end_thread(self) -> None:
        with self._lock:
            self._closing = self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self.urge()
            self._thread.join(self._options.stall_timeout_s)
            if self._thread.is_alive():
                raise self._stalled(self._options.stall_timeout_s)
        self._committer.close()

    def _require_open(self) -> None:
        self._require_healthy()
        if self._closed:
            raise ValueError("the log writer is closed")

    def _require_healthy(self) -> None:
        if self._error is not None:
            raise self._error

    def _fits(self, size: int) -> bool:
        pending = self._pending_bytes
        limit = self._options.max_pending_bytes
        return self._error is not None or pending == 0 or pending + size <= limit

    def _stalled(self, seconds: float) -> StorageError:
        return StorageError(
            f"the experience log did not become durable within {seconds:g} s",
            where="log",
            rule="storage answers in time",
            way_out="check the disk, then resume the run; nothing acknowledged is lost",
        )

    def _run(self) -> None:
        # What ends the thread has been given to every future and is raised by every later call.
        with contextlib.suppress(BaseException):
            while self._wait_for_work():
                self._clock.wait(self._urged, self._options.linger_s)
                self._urged.clear()
                self._commit_waiting()

    def _wait_for_work(self) -> bool:
        """Wait for entries; False: the writer closes, or the process ends without closing it."""
        with self._lock:
            while not (self._waiting or self._closing):
                if not threading.main_thread().is_alive():
                    break
                self._changed.wait(_IDLE_S)
            return bool(self._waiting)

    def _commit_waiting(self) -> None:
        """Commit everything that waits, batch by batch."""
        while self._commit_next():
            pass

    def _commit_next(self) -> bool:
        with self._lock:
            if not self._waiting:
                return False
            batch = self._committing = self._waiting.popleft()
        try:
            packed = pack_entries(batch.entries, batch.memory)
            self._committer.commit(packed)
            batch.memory.take_back()
            self._acknowledge(batch, packed)
        except BaseException as error:
            self._fail(batch, error)
            raise
        return True

    def _acknowledge(self, batch: _Batch, packed: Sequence[PackedEntries]) -> None:
        positions = (entry.position for last in reversed(packed) for entry in last.entries)
        with self._lock:
            self._position = next((p for p in positions if p is not None), self._position)
            self._pending_bytes -= batch.size
            for item in batch.entries:
                self._batch_of.pop(item.key, None)
            self._changed.notify_all()
        batch.future.set_result(self._position)
        self._faults.reach(FaultPoint.LOG_ACKNOWLEDGED)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        with self._lock:
            self._error = error
            waiting = list(self._waiting)
            self._waiting.clear()
            self._pending_bytes = 0
            self._changed.notify_all()
        for failed in (batch, *waiting):
            if not failed.future.done():
                failed.future.set_exception(error)
