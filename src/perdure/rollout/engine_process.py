"""The process of one embedded engine: ``python -m perdure.rollout.engine_process``.

Started by :class:`~perdure.rollout.process_engine.ProcessEngine`, which holds the other end of its
socket. It ends with that: at the end of the stream, and by the kernel when the parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import WeightFile
from perdure.models.transformer import ModelConfig
from perdure.rollout.embedded import COUNTERS, EmbeddedEngine
from perdure.rollout.engine_messages import (
    VERBS,
    Inbox,
    chunk_fields,
    error_fields,
    pack,
    request_from,
)
from perdure.rollout.options import EngineOptions

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 2**20


class EngineServer:
    """Serves one engine to the client at the other end of a socket.

    Messages of one turn of the event loop are sent together.
    """

    def __init__(
        self, engine: EmbeddedEngine, writer: asyncio.StreamWriter, *, heartbeat_s: float
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._heartbeat_s = heartbeat_s
        self._outgoing: list[bytes] = []
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._unsettled = False

    async def serve(self, messages: AsyncIterator[tuple[Any, ...]]) -> None:
        """Answer until there are no more messages; what still runs then is given up."""
        async with asyncio.TaskGroup() as tasks:
            beats = tasks.create_task(self._beat())
            async for kind, *fields in messages:
                if kind == "generate":
                    number, request = fields
                    self._pumps[number] = tasks.create_task(self._pump(number, request))
                    self._unsettled = True
                elif kind == "drop":
                    await self._settle()
                    self._drop(*fields)
                else:
                    await self._settle()
                    await self._call(*fields)
            for task in (beats, *self._pumps.values()):
                task.cancel()
        await self._engine.close()

    async def _settle(self) -> None:
        """Let the engine learn of the requests that came and went before what is next."""
        if self._unsettled:
            self._unsettled = False
            await asyncio.sleep(0)

    async def _beat(self) -> None:
        """Signs of life, as regular as the event loop is free; ends with the process."""
        while True:
            self._send("beat")
            await asyncio.sleep(self._heartbeat_s)

    async def _pump(self, number: int, request: tuple[Any, ...]) -> None:
        """Send what the engine gives for one request; cancellation ends the request."""
        try:
            async for chunk in self._engine.generate(request_from(request)):
                self._send("chunk", number, *chunk_fields(chunk))
        except Exception as error:  # noqa: BLE001 - the client raises it
            self._send("failed", number, *error_fields(error))
        finally:
            del self._pumps[number]

    def _drop(self, number: int) -> None:
        if number in self._pumps:
            self._pumps[number].cancel()
            self._unsettled = True

    async def _call(self, number: int, verb: str, *args: Any) -> None:
        try:
            assert verb in VERBS
            if verb == "load_weights":
                result = await self._load(*args)
            else:
                result = await getattr(self._engine, verb)(*args)
            self._send("answer", number, result, self._engine.version)
        except Exception as error:  # noqa: BLE001 - the client raises it
            self._send("refused", number, *error_fields(error))

    async def _load(self, version: int, path: str, checksum: str, incarnation: int) -> str:
        return await self._engine.load_weights(
            PolicyVersion(version),
            WeightFile(path, checksum),
            incarnation=IncarnationNumber(incarnation),
        )

    def _send(self, *message: Any) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(pack(message))

    def _flush(self) -> None:
        self._writer.write(b"".join(self._outgoing))
        self._outgoing.clear()


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[tuple[Any, ...]]:
    inbox = Inbox()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            for message in inbox.feed(data):
                yield message


async def serve(connected: socket.socket, counters: np.ndarray[Any, Any]) -> None:
    """Build the engine that the first message describes, and serve it until the client is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=connected)
    messages = _messages(reader)
    async for model, options, heartbeat_s, threads in messages:
        torch.set_num_threads(threads)
        engine = EmbeddedEngine(
            ModelConfig.model_validate_json(model),
            EngineOptions.model_validate_json(options),
            counters=counters,
        )
        server = EngineServer(engine, writer, heartbeat_s=heartbeat_s)
        await server.serve(messages)
    writer.close()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, stopped or busy as it may be."""
    # Without prctl (not Linux) the end of the socket is what tells.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def main() -> None:
    """``engine_process SOCKET COUNTERS PARENT``: two descriptors and a process id."""
    connection, counters, parent = (int(text) for text in sys.argv[1:])
    die_with_parent(parent)
    # Sent to the whole group, they are for the parent, which ends this process when it wants to.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    shared = np.frombuffer(mmap.mmap(counters, COUNTERS * 8), np.uint64)
    asyncio.run(serve(socket.socket(fileno=connection), shared))


if __name__ == "__main__":
    main()
