"""An embedded engine in a process of its own, as seen from here.

What the process sent before it died is streamed; then its streams end with ``EngineLostError``. The
end of its socket tells at once; a process that lives and gives no sign of life is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perdure.core.errors import EngineLostError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import (
    NO_INCARNATION,
    EngineCapabilities,
    GenerationChunk,
    GenerationRequest,
    LossListener,
    WeightFile,
    Weights,
)
from perdure.models.transformer import ModelConfig
from perdure.models.weight_files import write_weights
from perdure.rollout.embedded import COUNTERS, NO_VERSION
from perdure.rollout.engine_messages import Inbox, chunk_from, error_from, pack, request_fields
from perdure.rollout.options import EngineOptions, ProcessOptions
from perdure.rollout.silence import SilenceWatch, no_sign_of_life
from perdure.storage import PosixStorage

_KILL_WAIT_S = 5.0
_MODULE = "perdure.rollout.engine_process"


class ProcessEngine(asyncio.Protocol):
    """``core.rollout_api.RolloutEngine``; made by :meth:`start`, ends with :meth:`close`.

    Few tokens per chunk (``EngineOptions.chunk_tokens``) are few tokens that die with the process.
    """

    def __init__(self, options: EngineOptions, process_options: ProcessOptions) -> None:
        self._process_options = process_options
        self.capabilities = EngineCapabilities(
            sleep_frees_memory=True, slots=options.slots, max_tokens=options.max_tokens
        )
        self._version = NO_VERSION
        self._inbox = Inbox()
        self._streams: dict[int, asyncio.Queue[GenerationChunk | Exception]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._counters = np.zeros(COUNTERS, np.uint64)
        self._received = 0
        self._listeners: list[LossListener] = []
        self._loss = ""
        self._closed = False
        self._watch = SilenceWatch(
            process_options.silence_timeout_s,
            on_silence=lambda silent_s: self._lose(
                no_sign_of_life(silent_s, process_options.silence_timeout_s)
            ),
        )

    @classmethod
    async def start(
        cls,
        model_config: ModelConfig,
        options: EngineOptions,
        *,
        process_options: ProcessOptions | None = None,
    ) -> ProcessEngine:
        """Start the process and wait until its engine is built.

        Raises:
            EngineLostError: It could not be started, died, or has not answered for
                ``start_timeout_s``.
        """
        engine = cls(options, process_options or ProcessOptions())
        try:
            await engine._start(model_config, options)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _start(self, model_config: ModelConfig, options: EngineOptions) -> None:
        settings = self._process_options
        ours = self._spawn(settings.threads)
        loop = asyncio.get_running_loop()
        ready = self._calls[0] = loop.create_future()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        described = (model_config.model_dump_json(), options.model_dump_json())
        self._send(*described, settings.heartbeat_s, settings.threads)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await ready
        except TimeoutError:
            self._lose(f"has not started for {settings.start_timeout_s:g} s")
            raise self._lost() from None
        finally:
            del self._calls[0]
        self._watch.start()

    def _spawn(self, threads: int) -> socket.socket:
        """Start the process; returns this end of its socket.

        Raises:
            EngineLostError: The machine gives no process, descriptor or memory for it.
        """
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                self._start_process(theirs, threads)
            except OSError as error:
                raise EngineLostError(
                    f"an engine process cannot be started ({error})",
                    where="rollout engine",
                    rule="an engine has a process, a socket and a page of memory of its own",
                    way_out="look at the limits of processes, open files and memory (ulimit -a)",
                ) from error
            undo.pop_all()
        return ours

    def _start_process(self, theirs: socket.socket, threads: int) -> None:
        with theirs, tempfile.TemporaryFile() as shared:
            shared.truncate(COUNTERS * 8)
            self._counters = np.frombuffer(mmap.mmap(shared.fileno(), COUNTERS * 8), np.uint64)
            descriptors = (theirs.fileno(), shared.fileno())
            arguments = [*map(str, descriptors), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    # --- the engine protocol

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._process is None else self._process.pid

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights last acknowledged; -1 before the first."""
        return self._version

    @property
    def decoded_tokens(self) -> int:
        """All that the process has decoded, up to its last step."""
        return int(self._counters[0])

    @property
    def undelivered_tokens(self) -> int:
        decoded, _, unwanted = self._counters.tolist()
        return decoded - unwanted - self._received

    def on_loss(self, tell: LossListener) -> None:
        self._listeners.append(tell)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        """Stream the answer; see the contract."""
        self._check_usable()
        number = next(self._numbers)
        # It holds one request's answer at most.
        stream = self._streams[number] = asyncio.Queue[GenerationChunk | Exception]()
        self._send("generate", number, request_fields(request))
        over = False
        try:
            while not over:
                item = await stream.get()
                over = isinstance(item, Exception) or item.stop_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            del self._streams[number]
            if not over:
                self._send("drop", number)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return await self._call("abort", request_ids)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Weights,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        """Have the process load them; see the contract. A mapping travels in a file of its own."""
        if isinstance(weights, WeightFile):
            where = (weights.path, weights.checksum)
            return await self._call("load_weights", version, *where, incarnation)
        with tempfile.TemporaryDirectory(prefix="perdure-weights-") as directory:
            storage = PosixStorage(Path(directory))
            checksum = await asyncio.to_thread(write_weights, storage, "weights", weights)
            file = WeightFile(str(Path(directory, "weights")), checksum)
            return await self.load_weights(version, file, incarnation=incarnation)

    async def close(self) -> None:
        """End every stream with ``RuntimeError`` and the process with it. Idempotent."""
        if not self._closed:
            self._closed = True
            self._hang_up()
            for number in list(self._streams):
                self._deliver(number, RuntimeError("the engine is closed"))
            self._fail_calls(RuntimeError("the engine is closed"))
        if self._process is not None:
            self._process.kill()
            # One that hangs in the kernel ends when it comes back.
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _KILL_WAIT_S)

    # --- messages

    def data_received(self, data: bytes) -> None:
        self._watch.heard()
        for kind, *fields in self._inbox.feed(data):
            if kind == "chunk":
                number, *rest = fields
                chunk = chunk_from(tuple(rest))
                self._received += len(chunk.token_ids)
                self._deliver(number, chunk)
            elif kind == "failed":
                number, *error = fields
                self._deliver(number, error_from(tuple(error)))
            elif kind == "answer":
                number, result, version = fields
                self._version = PolicyVersion(version)
                self._settle(number, result)
            elif kind == "refused":
                number, *error = fields
                self._settle(number, error_from(tuple(error)))
            else:
                self._settle(0, None)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._lose("died")

    def _deliver(self, number: int, item: GenerationChunk | Exception) -> None:
        if number in self._streams:
            self._streams[number].put_nowait(item)

    def _settle(self, number: int, result: object) -> None:
        call = self._calls.get(number)
        if call is None or call.done():
            return
        if isinstance(result, Exception):
            call.set_exception(result)
        else:
            call.set_result(result)

    async def _call(self, verb: str, *args: Any) -> Any:
        self._check_usable()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, verb, *args)
        try:
            return await answer
        finally:
            del self._calls[number]

    def _send(self, *message: Any) -> None:
        if self._transport is not None:
            self._transport.write(pack(message))

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._loss:
            raise self._lost()

    # --- the end

    def _lose(self, reason: str) -> None:
        """The process is dead, or will be: nothing of it is waited for any more."""
        if self._loss or self._closed:
            return
        self._loss = reason
        self._hang_up()
        if self._process is not None:
            self._process.kill()
        for number in list(self._streams):
            self._deliver(number, self._lost())
        self._fail_calls(self._lost())
        for tell in self._listeners:
            tell(self._lost())

    def _lost(self) -> EngineLostError:
        return EngineLostError(
            f"engine process {self.pid} {self._loss}",
            where="rollout engine",
            rule="a lost engine's requests go on elsewhere",
            way_out="see its output on standard error, and the kernel's log for lack of memory",
        )

    def _fail_calls(self, error: Exception) -> None:
        for number in list(self._calls):
            self._settle(number, error)

    def _hang_up(self) -> None:
        self._watch.stop()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
