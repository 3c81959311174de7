"""The head of a cluster: whether anybody answers there, before it is joined and while it is needed.

Ray itself waits for a head that is gone for a minute or two, and then ends the process.
"""

from __future__ import annotations

import asyncio
import os
import socket

from perdure.core.clock import Clock
from perdure.core.errors import InfrastructureError


def answers(address: str, *, timeout_s: float) -> bool:
    """Whether a head speaks at ``host:port``.

    Its server speaks first, unasked; one that is stopped accepts the connection and is silent.
    Under TLS the client speaks first: then an open door is all that can be seen.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            return _uses_tls() or bool(connection.recv(1))
    except (OSError, ValueError):
        return False


async def watch_head(address: str, *, interval_s: float, timeout_s: float, clock: Clock) -> None:
    """Look whether the head answers, again and again. Runs until cancelled.

    Only looks and the pauses between them count, so that an event loop that was busy is not taken
    for silence.

    Raises:
        InfrastructureError: It has not answered for ``timeout_s``.
    """
    silent_s = 0.0
    while silent_s < timeout_s:
        there, took_s = await asyncio.to_thread(_look, address, interval_s, clock)
        silent_s = 0.0 if there else silent_s + took_s + interval_s
        await asyncio.sleep(interval_s)
    raise _gone(address, timeout_s)


def _look(address: str, timeout_s: float, clock: Clock) -> tuple[bool, float]:
    """Whether the head answers, and the seconds until that was clear."""
    began_s = clock.monotonic_s()
    return answers(address, timeout_s=timeout_s), clock.monotonic_s() - began_s


async def require_head(address: str, *, timeout_s: float) -> None:
    """Look before something is done that Ray ends the process or its event loop for.

    Raises:
        InfrastructureError: It has not answered for ``timeout_s``.
    """
    if not await asyncio.to_thread(answers, address, timeout_s=timeout_s):
        raise _gone(address, timeout_s)


def _gone(address: str, timeout_s: float) -> InfrastructureError:
    """The error of a head that was there."""
    return InfrastructureError(
        f"the head of the cluster at {address} has not answered for {timeout_s:g} s",
        where="ray runtime",
        rule="engines are placed, found and replaced through the head",
        way_out="start it again and resume the run, there or with another ray.address or"
        " runtime=local",
    )


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
