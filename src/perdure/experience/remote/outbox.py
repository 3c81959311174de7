"""What a worker has sent, or is going to send, and has no answer to."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

from perdure.core.errors import StorageError
from perdure.core.ids import LogPosition
from perdure.experience.remote.frames import BadFrameError, Frame, number_frame
from perdure.experience.remote.refusals import Refusal
from perdure.experience.remote.wire import POLL_S


class Request(NamedTuple):
    """A frame, and the future of its answer; numbers count from 1 without gaps.

    A question is answered by a frame of its own, anything else by the position it is durable at.
    """

    number: int
    frame: bytearray
    future: Future[Any]
    is_question: bool


class Outbox:
    """Unanswered requests in their order, up to ``max_bytes`` of frames (one fits always).

    Thread-safe. ``changed`` is its lock, and is notified of every change. Futures are resolved
    without the lock, by whoever passes the answer on.
    """

    def __init__(self, max_bytes: int) -> None:
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        """What ended it; nothing is added any more."""
        self._max_bytes = max_bytes
        self._requests: deque[Request] = deque()
        self._bytes = 0
        self._newest = 0

    def add(self, frame: bytearray, *, is_question: bool = False, timeout_s: float) -> Request:
        """Number a frame and keep it until it is answered; waits while there is no room.

        Raises:
            StorageError: There is no room after ``timeout_s``; or any ``failure``.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self._fits(len(frame)), timeout_s):
                raise StorageError(
                    f"{self._bytes} bytes were not acknowledged within {timeout_s:g} s",
                    where="remote store",
                    rule=f"at most {self._max_bytes} bytes wait for their acknowledgement",
                    way_out="check the process that writes the run, and its disk",
                )
            self.require_healthy()
            self._newest += 1
            future: Future[Any] = Future()
            # An append that is on its way cannot be taken back.
            future.set_running_or_notify_cancel()
            numbered = number_frame(frame, self._newest)
            request = Request(self._newest, numbered, future, is_question)
            self._requests.append(request)
            self._bytes += len(frame)
            self.changed.notify_all()
            return request

    def require_healthy(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def unanswered(self, above: int = 0) -> list[Request]:
        """Requests with numbers above that, in order."""
        with self.changed:
            return [request for request in self._requests if request.number > above]

    def wait_for_some(self, stop: threading.Event) -> None:
        """Return when something is unanswered, ``stop`` is set, or the process ends."""
        with self.changed:
            while not (self._requests or stop.is_set()) and threading.main_thread().is_alive():
                self.changed.wait(POLL_S)

    def acknowledge(self, number: int, position: LogPosition) -> None:
        """Everything up to a number is acknowledged.

        Raises:
            BadFrameError: Nothing with that number waits for an answer, or a question does.
        """
        for request in self._take(number, questions=False):
            request.future.set_result(position)

    def tell(self, frame: Frame) -> None:
        """The store has answered a question; what came before is answered.

        Raises:
            BadFrameError: It is not the next to be answered.
        """
        (request,) = self._take(frame.number, at_most=1, questions=True)
        request.future.set_result(frame)

    def refuse(self, number: int, error: Refusal) -> None:
        """The store refused a request; those before it are answered.

        Raises:
            BadFrameError: It is not the next to be answered.
        """
        (request,) = self._take(number, at_most=1)
        request.future.set_exception(error)

    def fail(self, error: Exception) -> None:
        """Nothing will be answered any more."""
        with self.changed:
            self.failure = self.failure or error
            failed = list(self._requests)
            self._requests.clear()
            self._bytes = 0
            self.changed.notify_all()
        for request in failed:
            request.future.set_exception(error)

    def _take(
        self, number: int, *, at_most: int | None = None, questions: bool | None = None
    ) -> list[Request]:
        """Remove the requests up to a number, all of them questions or none (None: either)."""
        with self.changed:
            first = self._requests[0].number if self._requests else self._newest + 1
            last = self._newest if at_most is None else first + at_most - 1
            if not first <= number <= min(last, self._newest):
                raise BadFrameError(f"an answer to {number} where {first} is the next")
            taken = list(itertools.islice(self._requests, number - first + 1))
            if questions is not None and any(one.is_question is not questions for one in taken):
                raise BadFrameError(f"an answer to {number} that is not of its kind")
            for _ in taken:
                self._requests.popleft()
            self._bytes -= sum([len(request.frame) for request in taken])
            self.changed.notify_all()
            return taken

    def _fits(self, size: int) -> bool:
        used = self._bytes
        return self.failure is not None or used == 0 or used + size <= self._max_bytes
