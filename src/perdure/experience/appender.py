"""Records on their way to the log: counted at once, placed when they are acknowledged."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from perdure.core.ids import LogPosition, SessionId
from perdure.core.records import ControlRecord, SessionDone
from perdure.experience.entries import Entry, Payload
from perdure.experience.fold import ExperienceState
from perdure.experience.writer import LogWriter


@dataclass(frozen=True, slots=True)
class _Append:
    records: list[ControlRecord]
    entries: list[Entry]
    future: Future[LogPosition]


class Appender:
    """Keeps a fold and a log writer in step. Thread-safe.

    The first failure is final, because the fold is then ahead of the log: every later call raises
    it.

    Args:
        durable: Called for every session whose tokens and reward are acknowledged.
    """

    def __init__(
        self, state: ExperienceState, writer: LogWriter, *, durable: Callable[[SessionId], None]
    ) -> None:
        self.lock = threading.RLock()
        self._state = state
        self._writer = writer
        self._durable = durable
        self._unacknowledged: deque[_Append] = deque()
        self._error: BaseException | None = None

    def append(self, records: Sequence[ControlRecord]) -> Future[LogPosition]:
        """Count and log records in one batch; those that counted before are left out.

        If one is illegal, those before it are logged all the same, as the fold has counted them.
        """
        assert records, "an append has records"
        with self.lock:
            self.require_healthy()
            fresh: list[ControlRecord] = []
            try:
                fresh.extend(record for record in records if self._state.apply(None, record))
            finally:
                future = self._write(fresh, [Entry(record) for record in fresh]) if fresh else None
            return future or self._first(records[-1])

    def append_session(
        self, record: SessionDone, payload: Callable[[], Payload]
    ) -> tuple[Future[LogPosition], bool]:
        """Count and log a session with its payload; tells whether it is new."""
        with self.lock:
            self.require_healthy()
            if not self._state.apply(None, record):
                return self._first(record), False
            return self._write([record], [Entry(record, payload())]), True

    def urge(self) -> Future[LogPosition]:
        """Commit without lingering; resolves when everything appended so far is acknowledged."""
        with self.lock:
            self.require_healthy()
            self._writer.urge()
            if self._unacknowledged:
                return self._unacknowledged[-1].future
            return _resolved(self._writer.position)

    def require_healthy(self) -> None:
        """Raise the failure of the log, if it has failed."""
        self.place_acknowledged()
        if self._error is not None:
            raise self._error

    def place_acknowledged(self) -> None:
        """Tell the fold where acknowledged records lie; looks at what is new alone."""
        with self.lock:
            while self._unacknowledged and self._unacknowledged[0].future.done():
                append = self._unacknowledged.popleft()
                error = append.future.exception()
                if error is not None:
                    self._error = self._error or error
                    continue
                for record, entry in zip(append.records, append.entries, strict=True):
                    self._place(record, entry)

    def _write(self, records: list[ControlRecord], entries: list[Entry]) -> Future[LogPosition]:
        try:
            future = self._writer.append(entries)
        except BaseException as error:
            self._error = error
            raise
        self._unacknowledged.append(_Append(records, entries, future))
        return future

    def _first(self, record: ControlRecord) -> Future[LogPosition]:
        """The future of the first append of this record."""
        key = record.key()
        for append in self._unacknowledged:
            if any(waiting.key() == key for waiting in append.records):
                return append.future
        # A retired record has no place of its own any more; the end of the log covers it.
        position = self._state.position_of(record) or self._state.position
        assert position is not None
        return _resolved(position)

    def _place(self, record: ControlRecord, entry: Entry) -> None:
        assert entry.position is not None
        if isinstance(record, SessionDone):
            assert entry.ref is not None
            record = dataclasses.replace(record, payload=entry.ref)
            self._durable(record.session)
        self._state.acknowledge(entry.position, record)


def _resolved(position: LogPosition) -> Future[LogPosition]:
    future: Future[LogPosition] = Future()
    future.set_result(position)
    return future
