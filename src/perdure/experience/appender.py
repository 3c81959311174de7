"""Records on their way to the log: counted at once, placed when they are acknowledged."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from perdure.core.experience_records import (
    GroupSettled,
    Partials,
    SessionsDone,
)
from perdure.core.ids import LogPosition
from perdure.core.records import ControlRecord
from perdure.experience.entries import Entry, PreparedEntry, prepare_entry
from perdure.experience.payloads import Payload
from perdure.experience.state import ExperienceState
from perdure.experience.trajectory_cache import TrajectoryCache
from perdure.experience.writer import LogWriter


@dataclass(frozen=True, slots=True)
class _Batch:
    """What was appended under one future of the writer."""

    future: Future[LogPosition]
    entries: list[Entry]


class Appender:
    """Keeps a fold, a log writer and a cache of trajectories in step. Thread-safe.

    The first failure is final, because the fold is then ahead of the log: every later call raises
    it.
    """

    def __init__(
        self, state: ExperienceState, writer: LogWriter, *, cache: TrajectoryCache
    ) -> None:
        self.lock = threading.RLock()
        self._state = state
        self._writer = writer
        self._cache = cache
        self._unacknowledged: deque[_Batch] = deque()
        self._error: BaseException | None = None
        self.partials: dict[str, Payload] = {}
        """Partial tokens that are not acknowledged, by the key of their control record."""

    def append(self, records: Sequence[ControlRecord]) -> Future[LogPosition]:
        """Count and log records in one batch; those that counted before are left out.

        If one is illegal, those before it are logged all the same, as the fold has counted them.
        """
        return self._append([Entry(record) for record in records])

    def append_sessions(
        self, sessions: Sequence[Entry], *, settled: Sequence[GroupSettled]
    ) -> Future[LogPosition]:
        """Count and log sessions with their trajectories, then what settles groups."""
        return self._append([*sessions, *map(Entry, settled)])

    def append_partials(self, partials: Sequence[Entry]) -> Future[LogPosition]:
        """Count and log partial tokens in one batch."""
        return self._append(partials)

    def wait_for_room(self) -> None:
        """Wait while too much is pending. Not while holding :attr:`lock`."""
        self._writer.wait_for_room()

    def urge(self) -> Future[LogPosition]:
        """Commit without lingering; resolves when everything appended so far is acknowledged."""
        with self.lock:
            self.place_acknowledged()
            self.require_healthy()
            self._writer.urge()
            return self._last()

    def commit_all(self) -> Future[LogPosition]:
        """As :meth:`urge`; a log without a thread of its own is committed before this returns."""
        with self.lock:
            self.place_acknowledged()
            self.require_healthy()
            last = self._last()
            self._writer.commit_all()
            return last

    def require_healthy(self) -> None:
        """Raise the failure of the log, if it has failed."""
        error = self._error or self._writer.error
        if error is not None:
            raise error

    def place_acknowledged(self) -> None:
        """Tell the fold where acknowledged records lie; looks at what is new alone."""
        with self.lock:
            while self._unacknowledged and self._unacknowledged[0].future.done():
                batch = self._unacknowledged.popleft()
                error = batch.future.exception()
                if error is not None:
                    self._error = self._error or error
                    continue
                self._state.acknowledge(batch.entries)
                for entry in batch.entries:
                    if isinstance(entry.control, SessionsDone):
                        self._cache.allow_drop(entry.control.sessions)
                    elif isinstance(entry.control, Partials):
                        del self.partials[entry.control.key()]

    def _append(self, entries: Sequence[Entry]) -> Future[LogPosition]:
        with self.lock:
            self.place_acknowledged()
            self.require_healthy()
            # Whatever cannot be encoded is refused before it counts.
            prepared = [prepare_entry(entry) for entry in entries]
            fresh: list[PreparedEntry] = []
            try:
                for item in prepared:
                    if self._state.apply(None, _control(item.entry)):
                        fresh.append(item)
                        self._hold(item)
            finally:
                future = self._write(fresh) if fresh else None
            return future or self._last()

    def _hold(self, item: PreparedEntry) -> None:
        """Keep tokens at hand until the log has them."""
        self._cache.add(item.entry.trajectories)
        if item.entry.payload is not None:
            self.partials[item.key] = item.entry.payload

    def _write(self, prepared: list[PreparedEntry]) -> Future[LogPosition]:
        entries = [item.entry for item in prepared]
        try:
            future = self._writer.append_prepared(prepared)
        except BaseException as error:
            self._error = error
            raise
        if self._unacknowledged and self._unacknowledged[-1].future is future:
            self._unacknowledged[-1].entries.extend(entries)
        else:
            self._unacknowledged.append(_Batch(future, entries))
        return future

    def _last(self) -> Future[LogPosition]:
        """The future of everything that was appended: also of records that counted before."""
        if self._unacknowledged:
            return self._unacknowledged[-1].future
        return _resolved(self._writer.position)


def _control(entry: Entry) -> ControlRecord:
    assert entry.control is not None
    return entry.control


def _resolved(position: LogPosition) -> Future[LogPosition]:
    future: Future[LogPosition] = Future()
    future.set_result(position)
    return future
