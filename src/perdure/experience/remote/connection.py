"""One worker's connection, in the process that writes the log."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from perdure.core.errors import FencedError, PerdureError
from perdure.core.ids import LogPosition
from perdure.experience.remote.frames import (
    APPENDS,
    QUESTIONS,
    BadFrameError,
    Frame,
    FrameType,
    make_frame,
    number_frame,
)
from perdure.experience.remote.handshake import greet
from perdure.experience.remote.refusals import REFUSALS
from perdure.experience.remote.replies import Replies, Reply
from perdure.experience.remote.requests import read_request
from perdure.experience.remote.unfinished import (
    prefixes_answer,
    read_partials,
    read_question,
    read_restart,
    read_result,
    results_answer,
)
from perdure.experience.remote.wire import Wire
from perdure.experience.store import ExperienceStore

_SEND_TIMEOUT_S = 60.0

Report = Callable[[Exception], None]
"""Receives why a connection ended: ``BadFrameError``, or a fault of this program."""


class Connection:
    """Appends what a worker sends, answers when it is acknowledged. Two owned threads.

    A worker that breaks the protocol or goes away ends its connection and nothing else. A full
    queue of the store holds the reader up, and so in the end the worker.
    """

    def __init__(self, wire: Wire, store: ExperienceStore, *, report: Report) -> None:
        self._wire = wire
        self._store = store
        self._report = report
        self._replies = Replies()
        self._number = 0
        self._reader = threading.Thread(target=self._read, name="perdure-remote-reader")
        self._replier = threading.Thread(target=self._reply, name="perdure-remote-replier")
        self._reader.start()
        self._replier.start()

    @property
    def is_over(self) -> bool:
        """Whether the threads have ended and the socket is closed."""
        return not self._replier.is_alive()

    def end(self) -> None:
        """Read no further. What was read is answered, then the connection is over."""
        self._wire.end_receiving()

    def join(self, timeout_s: float) -> bool:
        """Wait until it is over; False: something is unanswered, and it was ended by force."""
        self._replier.join(timeout_s)
        if self.is_over:
            return True
        self._replies.give_up()
        self._wire.hang_up()
        self._replier.join(timeout_s)
        return False

    def _read(self) -> None:
        """Consumes frames; waits for the store's queue; ended by ``end`` or the other side."""
        farewell = None
        try:
            greet(self._wire, run_id=self._store.run.run_id, incarnation=self._store.incarnation)
            while (frame := self._wire.receive()) is not None:
                self._handle(frame)
        except OSError:
            self._replies.give_up()
        except BadFrameError as error:
            farewell = number_frame(make_frame(FrameType.FAREWELL, {"reason": str(error)}), 0)
            self._report(error)
        except Exception as error:  # noqa: BLE001 - the owner learns of it
            self._report(error)
        finally:
            self._replies.end(farewell)

    def _reply(self) -> None:
        """Produces replies; waits for the log; unblocked by the end of the reader."""
        try:
            while frames := self._replies.next_frames():
                for frame in frames:
                    self._wire.send(frame, timeout_s=_SEND_TIMEOUT_S)
        except OSError:
            # The worker has gone; what was appended stays appended.
            pass
        except Exception as error:  # noqa: BLE001 - the owner learns of it
            self._report(error)
        finally:
            self._replies.give_up()
            self._wire.hang_up()
            self._reader.join()
            self._wire.close()

    def _handle(self, frame: Frame) -> None:
        if frame.type in APPENDS or frame.type in QUESTIONS:
            if self._number and frame.number != self._number + 1:
                raise BadFrameError(f"request {frame.number} follows {self._number}")
            self._number = frame.number
            answer, held_bytes = self._reply_to(frame)
            self._replies.add(frame.number, answer, held_bytes=held_bytes)
        elif frame.type is FrameType.URGE:
            # The failure of the log reaches the requests that are not answered.
            with contextlib.suppress(PerdureError):
                self._store.urge()
        else:
            raise BadFrameError(f"a worker does not send {frame.type.name}")

    def _reply_to(self, frame: Frame) -> tuple[Future[Reply], int]:
        """The future answer, and how many bytes of it are held until it is sent."""
        try:
            return self._tell(frame) if frame.type in QUESTIONS else (self._append(frame), 0)
        except REFUSALS as error:
            refused: Future[Reply] = Future()
            refused.set_exception(error)
            return refused, 0

    def _append(self, frame: Frame) -> Future[Any]:
        if frame.type is FrameType.PARTIALS:
            return self._store.partials(read_partials(frame))
        if frame.type is FrameType.TOOL_RESULT:
            return self._store.tool_result(read_result(frame))
        if frame.type is FrameType.SESSION_RESTARTED:
            return self._store.append(read_restart(frame))
        request = read_request(frame)
        if request.sessions is None:
            return self._store.sessions_done([], settled=request.settled)
        return self._store.packed_sessions_done(request.sessions, settled=request.settled)

    def _tell(self, frame: Frame) -> tuple[Future[Reply], int]:
        """Answer a question once all that the answer has is acknowledged."""
        sessions = read_question(frame)
        if frame.type is FrameType.ASK_PREFIXES:
            told = prefixes_answer(self._store.prefixes(sessions))
        else:
            told = results_answer({one: self._store.tool_results(one) for one in sessions})
        answer: Future[Reply] = Future()

        def tell(durable: Future[LogPosition]) -> None:
            error = durable.exception()
            if error is None and not self._store.is_highest:
                # Nothing was pending, so no commit has looked.
                error = FencedError(
                    "a newer incarnation has the run",
                    where="experience store",
                    rule="answers come from the highest incarnation",
                    way_out="ask the store of that one",
                )
            if error is None:
                answer.set_result(told)
            else:
                answer.set_exception(error)

        self._store.urge().add_done_callback(tell)
        return answer, len(told)
