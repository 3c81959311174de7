"""Who is at the other end: the frames that open a connection, and the sentences when it is wrong.

The listening end speaks first; the other one checks, answers, and from then on sends requests.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from perdure.core.errors import ConfigError, FutureFormatError, PerdureError, StorageError
from perdure.core.ids import IncarnationNumber
from perdure.experience.remote.frames import (
    MALFORMED,
    BadFrameError,
    FrameType,
    make_frame,
    number_frame,
)
from perdure.experience.remote.wire import Wire

PROTOCOL = 2
ANSWER_TIMEOUT_S = 10.0
"""Longest wait for the other end's first frame."""


class Hello(NamedTuple):
    """The first frame of either end; a worker repeats the incarnation that it was told."""

    protocol: int
    run_id: str
    incarnation: int


Connect = Callable[[], socket.socket]
"""Opens a stream to where the store listens, or raises ``OSError``."""


def connect_to(path: Path) -> socket.socket:
    """A stream to the socket at ``path``. Raises ``OSError`` if nobody listens there."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as stack:
        stack.callback(connected.close)
        connected.settimeout(ANSWER_TIMEOUT_S)
        connected.connect(str(path))
        stack.pop_all()
    return connected


def greet(wire: Wire, *, run_id: str, incarnation: IncarnationNumber) -> None:
    """Open a connection from the listening end.

    Raises:
        BadFrameError: The other end does not want this run, in this protocol.
        OSError: It is gone, or silent.
    """
    _say_hello(wire, Hello(PROTOCOL, run_id, incarnation))
    hello = _hear_hello(wire, ANSWER_TIMEOUT_S)
    if hello.protocol != PROTOCOL:
        raise BadFrameError(
            f"the worker speaks protocol {hello.protocol}, this store protocol {PROTOCOL}: run both"
            " with one perdure version"
        )
    if hello.run_id != run_id:
        raise BadFrameError(f"a worker of run {hello.run_id} came to run {run_id}")


def run_behind(path: Path, *, timeout_s: float) -> str | None:
    """The run whose store listens at ``path``, whatever protocol it speaks; None: there is none."""
    try:
        wire = Wire(connect_to(path))
    except OSError:
        return None
    try:
        return _hear_hello(wire, timeout_s).run_id
    except (OSError, BadFrameError):
        return None
    finally:
        wire.close()


def open_wire(connect: Connect, *, path: Path, run_id: str) -> tuple[Wire, IncarnationNumber]:
    """Connect to the store of a run; also tells which incarnation writes it.

    Raises:
        StorageError: Nobody listens there, or whoever does is not a store, or is silent.
        ConfigError: It is the store of another run, or speaks an older protocol.
        FutureFormatError: It speaks a newer protocol.
    """
    try:
        wire = Wire(connect())
    except OSError as error:
        raise unreachable(path, f"nobody listens here ({error.strerror or error})") from error
    try:
        hello = _hear_hello(wire, ANSWER_TIMEOUT_S)
        _check_hello(hello, path, run_id)
        _say_hello(wire, Hello(PROTOCOL, run_id, hello.incarnation))
    except (OSError, BadFrameError) as error:
        wire.close()
        raise unreachable(path, f"no store answers here: {error}") from error
    except PerdureError:
        wire.close()
        raise
    return wire, IncarnationNumber(hello.incarnation)


def unreachable(path: Path, what: str) -> StorageError:
    """The error when the store cannot be spoken to."""
    return StorageError(
        what,
        where=str(path),
        rule="the process that writes the run listens under this path",
        way_out="start or resume the run, connect again, and append what was not acknowledged",
    )


def _check_hello(hello: Hello, path: Path, run_id: str) -> None:
    if hello.protocol > PROTOCOL:
        raise FutureFormatError(
            f"the store speaks protocol {hello.protocol}",
            where=str(path),
            rule=f"this version speaks protocol {PROTOCOL}",
            way_out="use the perdure version that writes the run, or a newer one",
        )
    if hello.run_id != run_id:
        raise ConfigError(
            f"the store of run {hello.run_id} listens here",
            where=str(path),
            rule=f"run {run_id} was asked for",
            way_out="name the path of that run's store",
        )
    if hello.protocol < PROTOCOL:
        raise ConfigError(
            f"the store speaks protocol {hello.protocol}, which has no unfinished sessions",
            where=str(path),
            rule=f"both ends speak one protocol; this version speaks protocol {PROTOCOL}",
            way_out="resume the run with this perdure version, or use the one that writes it",
        )


def _say_hello(wire: Wire, hello: Hello) -> None:
    frame = make_frame(FrameType.HELLO, hello._asdict())
    wire.send(number_frame(frame, 0), timeout_s=ANSWER_TIMEOUT_S)


def _hear_hello(wire: Wire, timeout_s: float) -> Hello:
    frame = wire.receive(timeout_s)
    if frame is None:
        raise ConnectionError("it hung up without a word")
    try:
        if frame.type is not FrameType.HELLO:
            raise ValueError(f"{frame.type.name} came first")
        hello = Hello(*[frame.fields[name] for name in Hello._fields])
        if [type(value) for value in hello] != [int, str, int]:
            raise TypeError(f"it says {hello}")
    except MALFORMED as error:
        raise BadFrameError(f"the first frame is not a greeting: {error}") from error
    return hello
