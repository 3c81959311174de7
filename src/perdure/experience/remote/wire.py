"""One end of a connection: whole frames in, whole frames out."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading

from perdure.experience.format import HEADER_BYTES
from perdure.experience.remote.frames import BadFrameError, Frame, frame_length, parse_frame

POLL_S = 0.5
"""Longest wait inside the kernel; then it is seen whether the process ends."""
_POLL = struct.pack("ll", 0, int(POLL_S * 1e6))
_CHUNK_BYTES = 2**20
_SEND_BUFFER_BYTES = 2**20


class Wire:
    """A connected stream socket, which it owns. One thread receives, one at a time sends.

    Frames are read out of the kernel many at a time, into memory that is never written twice: their
    arrays are views of it.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        # The kernel keeps the time: a whole frame is then one call, also where it has to wait.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _POLL)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._memory = memoryview(b"")
        self._start = self._end = 0

    def send(self, frame: bytearray, *, timeout_s: float) -> None:
        """Send a whole frame.

        Raises:
            OSError: The other end is gone, or has read nothing for ``timeout_s``.
        """
        rest = memoryview(frame)
        patience = polls = math.ceil(timeout_s / POLL_S)
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
                patience = polls
            except BlockingIOError:
                patience -= 1
                if patience <= 0 or not threading.main_thread().is_alive():
                    raise TimeoutError(f"nothing was read for {timeout_s:g} s") from None

    def receive(self, timeout_s: float = math.inf) -> Frame | None:
        """Wait for the next frame; None: the stream ended behind a whole frame.

        Raises:
            BadFrameError: The stream ended inside a frame, or bytes are wrong.
            OSError: The connection failed, or nothing came for ``timeout_s``.
        """
        if not self._have(HEADER_BYTES, timeout_s):
            if self._end > self._start:
                raise BadFrameError("the stream ends inside the header of a frame")
            return None
        length = frame_length(self._memory[self._start : self._start + HEADER_BYTES])
        if not self._have(length, timeout_s):
            raise BadFrameError(f"the stream ends inside a frame of {length} bytes")
        start, self._start = self._start, self._start + length
        return parse_frame(self._memory[start : self._start].toreadonly())

    def end_receiving(self) -> None:
        """What was sent so far can still be received, then the stream ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """End the connection for both sides; who sends or receives now, stops."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; nobody may use it any more."""
        self._socket.close()

    def _have(self, count: int, timeout_s: float) -> bool:
        """Receive until ``count`` bytes are there; False: the stream ended before."""
        if self._start + count > len(self._memory):
            self._move(count)
        while self._end - self._start < count:
            received = self._receive_some(timeout_s)
            if not received:
                return False
            self._end += received
        return True

    def _receive_some(self, timeout_s: float) -> int:
        patience = timeout_s / POLL_S
        while threading.main_thread().is_alive():
            try:
                return self._socket.recv_into(self._memory[self._end :])
            except BlockingIOError:
                patience -= 1
                if patience <= 0:
                    raise TimeoutError(f"nothing came for {timeout_s:g} s") from None
        return 0

    def _move(self, count: int) -> None:
        """Go on in fresh memory, with what is left of the old."""
        left = self._memory[self._start : self._end]
        fresh = memoryview(bytearray(max(_CHUNK_BYTES, count)))
        fresh[: len(left)] = left
        self._memory, self._start, self._end = fresh, 0, len(left)
