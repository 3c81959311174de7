"""A rollout engine on a cluster, as seen from the controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, RayActorError, RayError, RayTaskError

from perdure.core.errors import EngineLostError, FencedError
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
from perdure.models import ModelConfig, digest_weights
from perdure.rollout import EngineOptions
from perdure.rollout.embedded import NO_VERSION
from perdure.rollout.silence import SilenceWatch, no_sign_of_life
from perdure.runtime.ray.cluster import NAMESPACE
from perdure.runtime.ray.object_store import stored_weights
from perdure.runtime.ray.placement import Placement, kill_named, lost, new_actor

_NAME_FREE_POLL_S = 0.1
"""Between two looks whether a dying actor has given its name up."""
_END_TIMEOUT_S = 2.0


class RayEngine:
    """``core.rollout_api.RolloutEngine``; made by :meth:`start`, ends with :meth:`close`.

    The actor lives on when its controller dies: the next one of the run finds it by name.

    Attributes:
        was_there: It has had another controller before.
        is_anothers: A controller of a higher incarnation has taken it over.
    """

    def __init__(
        self,
        actor: Any,
        options: EngineOptions,
        place: Placement,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
        has_run: Callable[[], bool] = lambda: False,
    ) -> None:
        self.capabilities = EngineCapabilities(
            sleep_frees_memory=True, slots=options.slots, max_tokens=options.max_tokens
        )
        self.undelivered_tokens = 0
        self.was_there = False
        self.is_anothers = False
        self._actor = actor
        self._incarnation = incarnation
        self._has_run = has_run
        self._may_hold_them = False
        self._place = place
        self._version = NO_VERSION
        self._listeners: list[LossListener] = []
        self._lost: EngineLostError | None = None
        self._closed = False
        self._ends: set[asyncio.Future[Any]] = set()
        self._pings: asyncio.Task[None] | None = None
        self._silence = SilenceWatch(
            place.silence_timeout_s,
            on_silence=self._fall_silent,
        )

    @classmethod
    async def start(
        cls,
        model_config: ModelConfig,
        options: EngineOptions,
        place: Placement,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
        has_run: Callable[[], bool] = lambda: False,
    ) -> RayEngine:
        """Find the actor of this name, or start it, and wait until it answers.

        Args:
            has_run: Whether this controller is provably the last that took the run. Only then an
                actor that does not answer is killed; else it is left to its own timeout.

        Raises:
            EngineLostError: There is no place for it in time, or it died.
            FencedError: The actor belongs to a higher incarnation.
        """

        def seen_here(actor: Any) -> RayEngine:
            return cls(actor, options, place, incarnation=incarnation, has_run=has_run)

        try:
            async with asyncio.timeout(place.start_timeout_s):
                engine = None
                while engine is None:
                    engine = await cls._found(place, seen_here)
                    if engine is None:
                        make = partial(new_actor, model_config, options, place, incarnation)
                        engine = await cls._made(make, seen_here)
        except TimeoutError:
            if has_run():
                kill_named(place.name)
            raise lost(
                place,
                f"has not started for {place.start_timeout_s:g} s: it waits for {place.cpus} CPUs",
            ) from None
        engine._silence.start()
        engine._pings = asyncio.get_running_loop().create_task(engine._ask_for_life())
        return engine

    @classmethod
    async def _made(
        cls, make: Callable[[], Any], seen_here: Callable[[Any], RayEngine]
    ) -> RayEngine | None:
        """A new one; None: somebody else has just made one of that name."""
        try:
            engine = seen_here(make())
        except ActorAlreadyExistsError:
            await asyncio.sleep(_NAME_FREE_POLL_S)
            return None
        try:
            await engine._attach()
        except asyncio.CancelledError:
            # Whoever answers nobody is not to keep its place.
            engine._kill()
            raise
        return engine

    @classmethod
    async def _found(
        cls, place: Placement, seen_here: Callable[[Any], RayEngine]
    ) -> RayEngine | None:
        """The one that an earlier controller has left; None: there is none, its name is free."""
        while True:
            try:
                actor = ray.get_actor(place.name, namespace=NAMESPACE)
            except ValueError:
                return None
            engine = seen_here(actor)
            try:
                await engine._attach()
            except EngineLostError:
                await asyncio.sleep(_NAME_FREE_POLL_S)
            else:
                return engine

    async def _attach(self) -> None:
        """Make it this controller's."""
        attached = self._actor.attach.remote(self._incarnation, self._place.orphan_timeout_s)
        self.was_there = await self._call(attached)
        self._may_hold_them = self.was_there

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights last acknowledged to this controller; -1 before the first."""
        return self._version

    async def pid(self) -> int:
        """Of the actor's process, on its node."""
        return await self._call(self._actor.pid.remote())

    def on_loss(self, tell: LossListener) -> None:
        self._listeners.append(tell)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        """Stream the answer; see the contract."""
        self._check_usable()
        chunks = self._actor.generate.options(num_returns="streaming").remote(
            self._incarnation, request
        )
        ended = False
        try:
            while not ended:
                chunk: GenerationChunk = await self._call(await self._call(anext(chunks)))
                ended = chunk.stop_reason is not None
                yield chunk
        finally:
            if not (ended or self._lost or self._closed):
                ray.cancel(chunks)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        ids = None if request_ids is None else list(request_ids)
        return await self._call(self._actor.abort.remote(self._incarnation, ids))

    async def pause(self) -> None:
        await self._call(self._actor.pause.remote(self._incarnation))

    async def resume(self) -> None:
        await self._call(self._actor.resume.remote(self._incarnation))

    async def sleep(self) -> None:
        await self._call(self._actor.sleep.remote(self._incarnation))

    async def wake(self) -> None:
        await self._call(self._actor.wake.remote(self._incarnation))

    async def load_weights(
        self,
        version: PolicyVersion,
        weights: Weights,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
    ) -> str:
        """Have the actor load them; see the contract."""
        digest = await self._keep(version, weights, incarnation)
        if digest is None:
            given = weights if isinstance(weights, WeightFile) else stored_weights(weights)
            digest = await self._call(self._actor.load_weights.remote(version, given, incarnation))
        self._version = version
        return digest

    async def _keep(
        self, version: PolicyVersion, weights: Weights, incarnation: IncarnationNumber
    ) -> str | None:
        """Have one that was there go on with what it holds, if that is the same."""
        kept, self._may_hold_them = self._may_hold_them, False
        if not kept or isinstance(weights, WeightFile):
            return None
        digest = digest_weights(weights)
        return await self._call(self._actor.keep_weights.remote(version, digest, incarnation))

    async def close(self) -> None:
        """End every stream with ``RuntimeError`` and the actor with it. Idempotent.

        An actor that a higher incarnation has taken over is left alone, and so is one that does
        not answer, unless nobody else can have it.
        """
        if self._closed:
            return
        await self.leave()
        if self._lost is not None:
            return
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._actor.end.remote(self._incarnation)
        except RayTaskError as error:
            self.is_anothers |= isinstance(error.cause, FencedError)
        except RayError:
            # It has ended.
            return
        except TimeoutError:
            self._kill()

    async def leave(self) -> None:
        """End every stream here and let the actor live, for the next controller of the run."""
        if not self._closed:
            self._closed = True
            await self._stop_watching()
            self._end_calls(RuntimeError("the engine is closed"))

    async def _stop_watching(self) -> None:
        self._silence.stop()
        if self._pings is not None:
            self._pings.cancel()
            await asyncio.wait([self._pings])

    async def _ask_for_life(self) -> None:
        """Ask for signs of life again and again. Runs until the engine is lost or closed."""
        try:
            while True:
                self.undelivered_tokens = await self._call(self._actor.ping.remote())
                self._silence.heard()
                await asyncio.sleep(self._place.heartbeat_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody watches the engine now
            if not self._closed:
                self._lose(f"cannot be watched: {error}")

    def _fall_silent(self, silent_s: float) -> None:
        self._lose(no_sign_of_life(silent_s, self._place.silence_timeout_s))

    async def _call(self, answer: Awaitable[Any]) -> Any:
        """Wait for an answer, or for the end of the engine."""
        self._check_usable()
        call = asyncio.ensure_future(answer)
        end = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else end.result()
        except RayTaskError as error:
            if isinstance(error.cause, RayError):
                raise self._lose(_first_line(error.cause)) from error
            self.is_anothers |= isinstance(error.cause, FencedError)
            raise error.cause from error
        except RayActorError as error:
            raise self._lose("died or cannot be reached") from error
        except RayError as error:
            raise self._lose(_first_line(error)) from error
        finally:
            self._ends.discard(end)
            end.cancel()
            call.cancel()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._lost is not None:
            raise self._lost

    def _lose(self, reason: str) -> EngineLostError:
        """The actor is dead, or as good as that: nothing of it is waited for any more."""
        if self._lost is None:
            self._lost = lost(self._place, reason)
            self._silence.stop()
            self._kill()
            self._end_calls(self._lost)
            for tell in self._listeners:
                tell(self._lost)
        return self._lost

    def _kill(self) -> None:
        """Have the cluster end one that does not answer, unless another controller may have it."""
        if self._has_run() and not self.is_anothers:
            ray.kill(self._actor)

    def _end_calls(self, error: Exception) -> None:
        for end in self._ends:
            if not end.done():
                end.set_exception(error)


def _first_line(error: RayError) -> str:
    return f"failed in Ray: {next(iter(str(error).splitlines()), type(error).__name__)}"
