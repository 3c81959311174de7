"""The store as another process sees it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from perdure.core.clock import Clock
from perdure.core.errors import FencedError, StorageError
from perdure.core.experience_records import GroupSettled, SessionRestarted, ToolResult
from perdure.core.ids import IncarnationNumber, LogPosition, SessionId
from perdure.core.trajectories import PartialDelta, SessionPrefix
from perdure.experience.finished import FinishedSession
from perdure.experience.remote.frames import (
    MALFORMED,
    BadFrameError,
    Frame,
    FrameType,
    make_frame,
    number_frame,
)
from perdure.experience.remote.handshake import Connect, connect_to, open_wire, unreachable
from perdure.experience.remote.outbox import Outbox
from perdure.experience.remote.refusals import read_refusal
from perdure.experience.remote.requests import sessions_frame
from perdure.experience.remote.unfinished import (
    partials_frame,
    question_frame,
    read_prefixes,
    read_results,
    restart_frame,
    result_frame,
)
from perdure.experience.remote.wire import Wire

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How a worker deals with a store that is slow or away.

    Attributes:
        max_unacknowledged_bytes: Above this, appending waits for acknowledgements.
        stall_timeout_s: Longest such wait, longest time in which the store reads nothing of a
            request, and the longest wait for what is read back, and on closing.
        reconnect_timeout_s: How long what was sent may stay unanswered with the store away.
        retry_s: Between two tries to reconnect.
    """

    max_unacknowledged_bytes: int = 64 * 2**20
    stall_timeout_s: float = 120.0
    reconnect_timeout_s: float = 60.0
    retry_s: float = 0.1


class RemoteStore:
    """Appends sessions, done or not, to the log of a run that another process writes. Thread-safe.

    Every method promises what that of ``ExperienceStore`` does, but what only the store can refuse
    (``LifecycleError``, ``FencedError``, ``StorageError``, ``DamagedError``) is raised by the
    future, and what is read back is durable.

    While the store is away, everything that is not answered is kept, and sent again in order to
    whoever listens under the path next, if it is the same run: the keys of the records see to it
    that nothing counts twice. When the store has been away for too long, every future fails,
    and so does every later call.

    Futures resolve in a thread of this object: what they call back must not wait for it.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        clock: Clock,
        options: RemoteOptions | None = None,
        connect: Connect | None = None,
    ) -> None:
        """Connect to the :class:`StoreServer` at ``path``, or to what ``connect`` leads to.

        Raises:
            StorageError: No store listens there.
            ConfigError: It is the store of another run, or speaks an older protocol.
            FutureFormatError: It speaks a newer protocol.
        """
        self._path = path
        self._run_id = run_id
        self._clock = clock
        self._options = options or RemoteOptions()
        self._connect = connect or (lambda: connect_to(path))
        self._outbox = Outbox(self._options.max_unacknowledged_bytes)
        self._order = threading.Lock()
        """Held by callers, also while they wait: frames leave in the order of their numbers."""
        self._sending = threading.Lock()
        """Held while bytes are sent, never while waiting for answers."""
        self._closing = threading.Event()
        self._away_since_s: float | None = None
        self._reason = ""
        self._log_failure: FencedError | StorageError | None = None
        self._incarnation = IncarnationNumber(0)
        self._wire = self._open()
        self._live: Wire | None = self._wire
        """Where callers send by themselves; None while the store is away."""
        self._thread = threading.Thread(target=self._run, name="perdure-remote-store")
        self._thread.start()

    def sessions_done(
        self, sessions: Sequence[FinishedSession], settled: Sequence[GroupSettled] = ()
    ) -> Future[LogPosition]:
        """Log the tokens and settled rewards of sessions, of any groups, in one batch.

        Raises:
            TrainingError: A reward is not finite; nothing was sent.
            TypeError: A value is not of the type that the format gives it; nothing was sent.
            ValueError: The sessions take 256 MiB or more, or this object is closed; nothing sent.
            StorageError: There was no room for ``stall_timeout_s``; or the store had been away for
                too long before, as every future said.
        """
        return self._request(sessions_frame(sessions, settled))

    def partials(self, deltas: Sequence[PartialDelta]) -> Future[LogPosition]:
        """Log the newest tokens of unfinished sessions, of any groups, in one batch.

        Tokens of an attempt that this worker gave up may be refused with a ``LifecycleError`` when
        they are sent again: nobody goes on from them.

        Raises:
            TypeError, ValueError: As ``ExperienceStore.partials``, or as :meth:`sessions_done`.
            StorageError: As :meth:`sessions_done`.
        """
        return self._request(partials_frame(deltas))

    def tool_result(self, record: ToolResult) -> Future[LogPosition]:
        """Journal the result of a tool call; use it only when the future has resolved.

        Raises:
            TypeError, ValueError: As ``ExperienceStore.tool_result``, or this object is closed.
            StorageError: As :meth:`sessions_done`.
        """
        return self._request(result_frame(record))

    def restart_session(
        self, session: SessionId, *, attempt: int, reason: str
    ) -> Future[LogPosition]:
        """Let an unfinished session start again from its prompt, as attempt ``attempt``.

        Raises:
            TypeError, ValueError: A value is not what a record can hold, or this object is closed.
            StorageError: As :meth:`sessions_done`.
        """
        return self._request(restart_frame(SessionRestarted(session, attempt, reason)))

    def prefix(self, session: SessionId) -> SessionPrefix:
        """Where an unfinished session goes on: :meth:`prefixes` of one."""
        return self.prefixes([session])[session]

    def prefixes(self, sessions: Sequence[SessionId]) -> dict[SessionId, SessionPrefix]:
        """What unfinished sessions have in the log; empty where nothing is.

        It waits until all that it returns is durable, and what was appended here before counts.
        Not to be called from what a future calls back.

        Raises:
            LifecycleError, DamagedError: As ``ExperienceStore.prefixes``.
            TypeError, ValueError: One is no session, they have 256 MiB or more, or this object is
                closed.
            FencedError, StorageError: The log failed, or no answer came for ``stall_timeout_s``.
        """
        return self._ask(FrameType.ASK_PREFIXES, sessions, read_prefixes)

    def tool_results(self, session: SessionId) -> dict[tuple[int, int], ToolResult]:
        """Journaled results of an unfinished session's newest attempt, by ``(turn, call)``.

        It waits as :meth:`prefixes` does, and raises the same errors.
        """
        return self._ask(FrameType.ASK_TOOL_RESULTS, [session], read_results)

    def flush(self, timeout_s: float) -> None:
        """Return when everything appended so far is answered; the store does not linger.

        Raises:
            FencedError, StorageError: The log failed something since the last call; or
                ``timeout_s`` have passed.
        """
        self._outbox.require_healthy()
        futures = [request.future for request in self._outbox.unanswered()]
        if futures:
            self._send(self._live, number_frame(make_frame(FrameType.URGE, {}), 0))
        _, late = concurrent.futures.wait(futures, timeout_s)
        if late:
            raise unreachable(self._path, f"{len(late)} appends got no answer in {timeout_s:g} s")
        self._outbox.require_healthy()
        failure, self._log_failure = self._log_failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait until everything is answered, then hang up.

        Raises:
            FencedError, StorageError: As :meth:`flush`. It is closed all the same.
        """
        if self._closing.is_set():
            return
        try:
            self.flush(self._options.stall_timeout_s)
        finally:
            with self._outbox.changed:
                self._closing.set()
                self._outbox.changed.notify_all()
                self._wire.hang_up()
            self._thread.join()
            self._outbox.fail(unreachable(self._path, "the worker closed before the answer came"))

    def _request(self, frame: bytearray, *, is_question: bool = False) -> Future[Any]:
        """Queue a frame and send it, if the store is there."""
        if self._closing.is_set():
            raise ValueError("the remote store is closed")
        timeout_s = self._options.stall_timeout_s
        with self._order:
            with self._outbox.changed:
                request = self._outbox.add(frame, is_question=is_question, timeout_s=timeout_s)
                wire = self._live
            self._send(wire, request.frame)
        return request.future

    def _ask(
        self, about: FrameType, sessions: Sequence[SessionId], read: Callable[[Frame], T]
    ) -> T:
        """The answer to a question."""
        timeout_s = self._options.stall_timeout_s
        answer = self._request(question_frame(about, sessions), is_question=True)
        concurrent.futures.wait([answer], timeout_s)
        if not answer.done():
            raise unreachable(self._path, f"a question got no answer in {timeout_s:g} s")
        return read(answer.result())

    def _send(self, wire: Wire | None, frame: bytearray) -> None:
        """Send to a live store; if that fails, the receiving thread sends it again."""
        if wire is not None:
            with self._sending:
                try:
                    wire.send(frame, timeout_s=self._options.stall_timeout_s)
                except OSError:
                    wire.hang_up()

    def _run(self) -> None:
        """Consumes answers; waits for the store; ended by ``close`` or the end of the process.

        What is unanswered then stays in the outbox.
        """
        while True:
            try:
                self._receive()
            except (OSError, BadFrameError) as error:
                self._reason = str(error)
            self._drop()
            try:
                if not self._reconnect():
                    return
            except Exception as error:  # noqa: BLE001 - every future raises it
                self._outbox.fail(error)
                return

    def _receive(self) -> None:
        """Pass answers on until the connection ends."""
        while (frame := self._wire.receive()) is not None:
            if frame.type is FrameType.FAREWELL:
                self._reason = str(frame.fields.get("reason"))
            else:
                self._pass_on(frame)

    def _pass_on(self, frame: Frame) -> None:
        if frame.type is FrameType.ACKNOWLEDGED:
            self._outbox.acknowledge(frame.number, _position(frame))
        elif frame.type is FrameType.TOLD:
            self._outbox.tell(frame)
        elif frame.type is FrameType.REFUSED:
            error = read_refusal(frame.fields)
            if isinstance(error, FencedError | StorageError):
                self._log_failure = error
            self._outbox.refuse(frame.number, error)
        else:
            raise BadFrameError(f"a store does not send {frame.type.name}")
        self._away_since_s = None

    def _drop(self) -> None:
        """Callers only queue from here on."""
        with self._outbox.changed:
            self._live = None
        self._wire.hang_up()
        # A number of a file that a sender still uses must not be given to the next connection.
        with self._sending:
            self._wire.close()

    def _reconnect(self) -> bool:
        """Connect and send everything unanswered again; False: there is nothing left to do.

        Raises:
            StorageError: Nothing was answered for ``reconnect_timeout_s``.
            ConfigError, FutureFormatError: It is no use to try again.
        """
        self._outbox.wait_for_some(self._closing)
        while not self._closing.is_set() and threading.main_thread().is_alive():
            self._wait_to_retry()
            try:
                wire = self._open()
            except StorageError as error:
                self._reason = error.what
                continue
            with self._outbox.changed:
                self._wire = wire
                if self._closing.is_set():
                    wire.hang_up()
            if self._send_again(wire):
                return True
            wire.close()
        return False

    def _wait_to_retry(self) -> None:
        now_s, options = self._clock.monotonic_s(), self._options
        if self._away_since_s is None:
            self._away_since_s = now_s
            return
        away_s = now_s - self._away_since_s
        if away_s >= options.reconnect_timeout_s:
            raise unreachable(
                self._path, f"the store has not answered for {away_s:.0f} s ({self._reason})"
            )
        self._clock.wait(self._closing, options.retry_s)

    def _open(self) -> Wire:
        wire, incarnation = open_wire(self._connect, path=self._path, run_id=self._run_id)
        if incarnation < self._incarnation:
            wire.close()
            raise unreachable(
                self._path,
                f"incarnation {incarnation} listens here, which {self._incarnation} has fenced",
            )
        self._incarnation = incarnation
        return wire

    def _send_again(self, wire: Wire) -> bool:
        """Send what is unanswered, then let callers send; False: the connection is lost again."""
        sent = 0
        while True:
            with self._outbox.changed:
                requests = self._outbox.unanswered(above=sent)
                if not requests:
                    self._live = wire
                    return True
            for request in requests:
                try:
                    wire.send(request.frame, timeout_s=self._options.stall_timeout_s)
                except OSError as error:
                    self._reason = str(error)
                    return False
                sent = request.number


def _position(frame: Frame) -> LogPosition:
    try:
        incarnation, segment, offset = frame.fields["position"]
        return LogPosition(IncarnationNumber(incarnation), segment, offset)
    except MALFORMED as error:
        raise BadFrameError(f"an acknowledgement cannot be read: {error}") from error
