"""SIGTERM and SIGUSR1 as requests that wait for the next safe point."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from perdure.core.clock import Clock

_SOON_S = 0.05
"""Longer than an iterator takes to be dropped."""
_LEAVE_S = 1.0
_Handler = Callable[[int, FrameType | None], Any] | int | None


class SignalRequests:
    """Notes signals while a loop runs. Only the main thread can listen; elsewhere nothing comes.

    A handler that was there before is put back at the end. That of SIGUSR1 is called as well at
    once; that of SIGTERM by :meth:`hand_on`, after the save, or by :meth:`make_up_for`, after a
    loop that was left without a safe point. A second SIGTERM goes to it directly.
    """

    def __init__(self, clock: Clock) -> None:
        self.save_requested = False
        self.stop_requested_s: float | None = None
        """When SIGTERM came, on the clock's monotonic scale."""
        self._answered = False
        self._clock = clock
        self._previous: dict[int, _Handler] = {}
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process that listens."""
        return os.getpid() != self._process

    def listen(self) -> bool:
        """Install the handlers; False outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number, handler in ((signal.SIGTERM, self._stop), (signal.SIGUSR1, self._save)):
            self._previous[number] = signal.signal(number, handler)
        return True

    def put_back(self) -> None:
        """Restore the earlier handlers, except where somebody has replaced ours meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, mine in ((signal.SIGTERM, self._stop), (signal.SIGUSR1, self._save)):
            # A handler that was not set from Python is None and cannot be set from here.
            previous = self._previous.get(number)
            if previous is not None and signal.getsignal(number) == mine:
                signal.signal(number, previous)
                del self._previous[number]

    def hand_on(self) -> None:
        """Call the handler of SIGTERM that was there before, if it is a function."""
        self._answered = True
        previous = self._previous.get(signal.SIGTERM)
        if callable(previous):
            previous(signal.SIGTERM, None)

    def make_up_for(self) -> None:
        """Let a SIGTERM that no safe point has answered have its effect; the handlers are back.

        The handler that was there before is called now. This may run while an iterator is dropped,
        where exceptions are lost: one that it raises is raised in the main thread a moment later.
        Without a handler the process ends by the signal, unless it ends by itself within a second.
        """
        if self.stop_requested_s is None or self._answered:
            return
        self._answered = True
        previous = signal.getsignal(signal.SIGTERM)
        if callable(previous):
            try:
                previous(signal.SIGTERM, None)
            except BaseException as error:  # noqa: BLE001 - raised where it is heard
                signal.signal(signal.SIGTERM, _raising(error, previous))
                _send_again(after_s=_SOON_S)
        elif previous != signal.SIG_IGN:
            _send_again(after_s=_LEAVE_S)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.forked or self.stop_requested_s is not None:
            self._as_before(number, frame)
            return
        self.stop_requested_s = self._clock.monotonic_s()

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.save_requested = True
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal would have done without us: in forked workers, and the second time."""
        self._answered = True
        previous = self._previous.get(number, signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _raising(error: BaseException, previous: _Handler) -> _Handler:
    """A handler that raises this once, and puts the one before back."""

    def handle(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, previous)
        raise error

    return handle


def _send_again(*, after_s: float) -> None:
    """Send SIGTERM to this process, unless its main thread has ended by then."""
    main = threading.main_thread()

    def send() -> None:
        main.join(after_s)
        if main.is_alive():
            os.kill(os.getpid(), signal.SIGTERM)

    # Without a thread the interpreter is ending already.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=send, name="sigterm").start()
