"""Which answers to a worker are due."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

from perdure.core.ids import LogPosition
from perdure.experience.remote.frames import FrameType, make_frame, number_frame
from perdure.experience.remote.refusals import REFUSALS, refusal_frame
from perdure.experience.remote.wire import POLL_S

MAX_UNANSWERED = 2**16
MAX_HELD_BYTES = 64 * 2**20
"""Of answers to questions, whose bytes are there before all that they tell is durable."""

Reply = LogPosition | bytearray
"""Where a request is durable, or the frame, without its number, that answers a question."""


class Replies:
    """Answers requests in their order, each as soon as it and all before it are settled.

    One acknowledgement stands for all requests up to its number that were neither refused nor
    answered by a frame of their own. Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unanswered: deque[tuple[int, Future[Reply], int]] = deque()
        self._newest: Future[Reply] | None = None
        self._held_bytes = 0
        self._sent_bytes = 0
        """Of those that ``next_frames`` has handed out last: they may still be on their way."""
        self._farewell: bytearray | None = None
        self._ended = False

    def add(self, number: int, future: Future[Reply], *, held_bytes: int = 0) -> None:
        """A request is to be answered; waits while there is no room (one answer fits always).

        Args:
            held_bytes: Of the answer, if it is a frame of its own.
        """
        with self._changed:
            while not (self._has_room(held_bytes) or self._over()):
                self._changed.wait(POLL_S)
            self._unanswered.append((number, future, held_bytes))
            self._held_bytes += held_bytes
            known, self._newest = future is self._newest, future
        if not known:
            future.add_done_callback(self._wake)

    def end(self, farewell: bytearray | None = None) -> None:
        """No request follows; ``farewell`` is sent behind the last answer."""
        with self._changed:
            self._farewell = farewell
            self._ended = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody is there to be answered."""
        with self._changed:
            self._unanswered.clear()
            self._held_bytes = self._sent_bytes = 0
            self._ended = True
            self._changed.notify_all()

    def next_frames(self) -> list[bytearray]:
        """Wait for frames to send; none: everything is answered and said.

        Those of the last call have been sent.
        """
        with self._changed:
            self._held_bytes -= self._sent_bytes
            self._sent_bytes = 0
            self._changed.notify_all()
            while not (self._is_due() or self._over()):
                self._changed.wait(POLL_S)
            frames = self._take_due()
            self._changed.notify_all()
            if not frames and self._farewell is not None:
                frames, self._farewell = [self._farewell], None
            return frames

    def _has_room(self, held_bytes: int) -> bool:
        fits = self._held_bytes == 0 or self._held_bytes + held_bytes <= MAX_HELD_BYTES
        return len(self._unanswered) < MAX_UNANSWERED and fits

    def _wake(self, future: Future[Reply]) -> None:
        del future
        with self._changed:
            self._changed.notify_all()

    def _is_due(self) -> bool:
        return bool(self._unanswered) and self._unanswered[0][1].done()

    def _over(self) -> bool:
        """Whether there is nothing to wait for, or the process ends without closing."""
        answered = self._ended and not self._unanswered
        return answered or not threading.main_thread().is_alive()

    def _take_due(self) -> list[bytearray]:
        frames: list[bytearray] = []
        acknowledged: tuple[int, LogPosition] | None = None
        while self._is_due():
            number, future, held_bytes = self._unanswered.popleft()
            self._sent_bytes += held_bytes
            reply = future.exception() or future.result()
            if isinstance(reply, LogPosition):
                acknowledged = number, reply
                continue
            if isinstance(reply, REFUSALS):
                reply = refusal_frame(reply)
            # Anything else is a fault of this program, and ends the thread that asks.
            elif isinstance(reply, BaseException):
                raise reply
            if acknowledged is not None:
                frames.append(_acknowledgement(*acknowledged))
                acknowledged = None
            frames.append(number_frame(reply, number))
        if acknowledged is not None:
            frames.append(_acknowledgement(*acknowledged))
        return frames


def _acknowledgement(number: int, position: LogPosition) -> bytearray:
    place = [position.incarnation, position.segment, position.offset]
    return number_frame(make_frame(FrameType.ACKNOWLEDGED, {"position": place}), number)
