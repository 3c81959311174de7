"""Notices that something gives no sign of life, without asking it again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_GRACE_FRACTION = 0.1


def no_sign_of_life(silent_s: float, limit_s: float) -> str:
    """What is wrong with an engine's process that was silent for longer than its limit."""
    return f"gives no sign of life for {silent_s:.1f} s (silence_timeout_s = {limit_s:g})"


class SilenceWatch:
    """Calls back once when nothing was heard for ``limit_s``, in the event loop's time.

    The event loop itself may have been busy, so that signs of life lie unread: what is found silent
    is therefore listened to for a tenth of the limit more.

    Args:
        limit_s: Of silence.
        expected: Whether anything is to be heard at the moment; time without counts for nothing.
        on_silence: Is given the seconds of silence.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        expected: Callable[[], bool] = lambda: True,
        on_silence: Callable[[float], None],
    ) -> None:
        self._limit_s = limit_s
        self._expected = expected
        self._on_silence = on_silence
        self._heard_s = 0.0
        self._suspected = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return asyncio.get_running_loop().time() - self._heard_s

    def heard(self) -> None:
        """A sign of life."""
        self._heard_s = asyncio.get_running_loop().time()
        self._suspected = False

    def start(self) -> None:
        """Listen from now on; does nothing if it does already."""
        if self._timer is None:
            self.heard()
            self._arm(self._limit_s)

    def stop(self) -> None:
        """Expect nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        if not self._expected():
            self.heard()
        silent_s = self.silent_s
        if silent_s < self._limit_s:
            self._arm(self._limit_s - silent_s)
        elif not self._suspected:
            self._suspected = True
            self._arm(self._limit_s * _GRACE_FRACTION)
        else:
            self._timer = None
            self._on_silence(silent_s)
