"""Publication: one version of the weights to every engine, each on its own, none by halves.

Order for each engine (spec F1): no traffic and nothing running (hold), load, compare digests,
traffic (admit). An engine that does not acknowledge the digest in time is quarantined, and serves
again only after it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from perdure.core.errors import EngineLostError, FencedError, TrainingError
from perdure.core.ids import IncarnationNumber, PolicyVersion
from perdure.core.rollout_api import NO_INCARNATION, PublicationTarget, Weights
from perdure.publish.transports import WeightTransport


class PublicationOptions(BaseModel):
    """How long an engine may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    acknowledge_timeout_s: float = Field(
        default=60.0, gt=0, description="An engine that has not acknowledged by then is left out."
    )
    no_engine_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait for an engine that is on its way, when no other one is there.",
    )


@dataclass(frozen=True, slots=True)
class Acknowledgements:
    """How a publication went.

    Attributes:
        engines: Those that hold the version and serve it.
        missing: The others, and why.
    """

    version: PolicyVersion
    engines: tuple[str, ...]
    missing: Mapping[str, str]


@dataclass(slots=True, eq=False)
class _Offer:
    version: PolicyVersion
    digest: str
    weights: Weights
    announce: Callable[[], None] | None
    """Still to be called; None once it was."""
    engines: list[str] = field(default_factory=list[str])
    acknowledged: asyncio.Event = field(default_factory=asyncio.Event)

    def is_held_by(self, engine: str) -> None:
        """The engine has acknowledged it and is about to serve."""
        announce, self.announce = self.announce, None
        if announce is not None:
            announce()
        self.engines.append(engine)
        self.acknowledged.set()


async def _at_once() -> None:
    """Nobody was expected."""


class Publication:
    """Brings versions to the engines of a target. Calls wait for each other.

    Args:
        target: The engines; their traffic is governed here.
        transport: How weights reach them; closed with the publication.
        incarnation: Of this process; engines refuse a lower one than they have seen.
    """

    def __init__(
        self,
        target: PublicationTarget,
        transport: WeightTransport,
        *,
        incarnation: IncarnationNumber = NO_INCARNATION,
        options: PublicationOptions | None = None,
    ) -> None:
        self._target = target
        self._transport = transport
        self._incarnation = incarnation
        self._options = options or PublicationOptions()
        self._current: _Offer | None = None
        self._late: dict[str, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()

    @property
    def version(self) -> PolicyVersion | None:
        """What engines are to hold; None before the first publication."""
        return None if self._current is None else self._current.version

    async def publish(
        self,
        version: PolicyVersion,
        *,
        weights: Mapping[str, Any],
        digest: str,
        announce: Callable[[], None] | None = None,
        nobody_comes: Callable[[], Awaitable[None]] = _at_once,
    ) -> Acknowledgements:
        """Bring ``weights`` to every engine as ``version``. They may change again afterwards.

        An engine that is late goes on loading; it is admitted when it acknowledges, unless another
        version has come by then. ``announce`` is called when the first engine has acknowledged,
        before any of them serves: other engines may be late, and tokens of a version come after the
        record of it. When nobody has acknowledged, one that comes by :meth:`catch_up` is waited
        for, until ``nobody_comes`` returns.

        Raises:
            TrainingError: No engine acknowledged ``digest``, and none has come for
                ``no_engine_timeout_s`` or will; none serves.
            FencedError: A higher incarnation has published to an engine.
            StorageError: The weights could not be laid out; engines go on with what they have.
        """
        async with self._lock:
            laid_out = await self._transport.lay_out(
                version, weights, incarnation=self._incarnation
            )
            self._current = offer = _Offer(version, digest, laid_out, announce)
            await self._forget_late(list(self._late))
            names = list(self._target.takers)
            reasons = await asyncio.gather(
                *(self._bring(name, offer) for name in names), return_exceptions=True
            )
            await self._transport.drop_older()
        for reason in reasons:
            if isinstance(reason, BaseException):
                raise reason
        missing = {name: str(reason) for name, reason in zip(names, reasons, strict=True) if reason}
        if len(missing) == len(names):
            await self._first(offer, missing, nobody_comes)
            missing = {name: why for name, why in missing.items() if name not in offer.engines}
            return Acknowledgements(version, tuple(offer.engines), missing)
        acknowledged = tuple(name for name in names if name not in missing)
        return Acknowledgements(version, acknowledged, missing)

    async def catch_up(self, name: str) -> bool:
        """Bring the current version to one engine that came later, or was lost and replaced.

        Returns whether it serves now. Raises ``FencedError`` like :meth:`publish`.
        """
        async with self._lock:
            if self._current is None:
                return False
            await self._forget_late([name])
            return await self._bring(name, self._current) is None

    async def close(self) -> None:
        """Wait for nobody any more and leave nothing behind."""
        async with self._lock:
            await self._forget_late(list(self._late))
            await self._transport.close()

    async def _first(
        self,
        offer: _Offer,
        missing: Mapping[str, str],
        nobody_comes: Callable[[], Awaitable[None]],
    ) -> None:
        """Wait for an engine that takes the offer; raises ``TrainingError`` if none will."""
        limit_s = self._options.no_engine_timeout_s
        waits = [
            asyncio.ensure_future(wait) for wait in (offer.acknowledged.wait(), nobody_comes())
        ]
        try:
            over, _ = await asyncio.wait(
                waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for wait in over:
            wait.result()
        if not offer.acknowledged.is_set():
            late = {} if over else {"replacements": f"none has come for {limit_s:g} s"}
            raise _nobody(offer.version, {**missing, **late})

    async def _bring(self, name: str, offer: _Offer) -> str | None:
        """One engine's publication; returns why it has not acknowledged."""
        limit_s = self._options.acknowledge_timeout_s
        task = asyncio.get_running_loop().create_task(self._load(name, offer))
        try:
            await asyncio.wait([task], timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if not task.done():
            reason = f"has not acknowledged version {offer.version} for {limit_s:g} s"
            self._target.quarantine(name, reason)
            self._late[name] = task
            return reason
        try:
            await task
        except FencedError:
            self._target.quarantine(name, "serves a higher incarnation")
            raise
        except Exception as error:  # noqa: BLE001 - the engine is left out, the reason is told
            reason = str(error) or type(error).__name__
            self._target.quarantine(name, reason)
            return reason
        return None

    async def _load(self, name: str, offer: _Offer) -> None:
        engine = self._target.takers.get(name)
        if engine is None:
            raise EngineLostError(
                f"engine {name!r} takes no weights",
                where="publication",
                rule="one that is lost or leaves is given none",
                way_out="see why it was lost; the others go on",
            )
        await self._target.hold(name)
        held = await engine.load_weights(
            offer.version, offer.weights, incarnation=self._incarnation
        )
        if held != offer.digest:
            raise TrainingError(
                f"engine {name!r} holds digest {held} instead of {offer.digest}",
                where=f"publication of policy version {offer.version}",
                rule="an engine serves what it has acknowledged by digest",
                way_out="the next publication tries again; check its memory if it repeats",
            )
        if offer is self._current:
            offer.is_held_by(name)
            await self._target.admit(name)

    async def _forget_late(self, names: list[str]) -> None:
        """Those who are late for an older version need not come any more."""
        tasks = [self._late.pop(name) for name in names if name in self._late]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nobody(version: PolicyVersion, missing: Mapping[str, str]) -> TrainingError:
    reasons = "; ".join(f"{name}: {why}" for name, why in missing.items()) or "there is none"
    return TrainingError(
        f"no engine acknowledged the weights ({reasons})",
        where=f"publication of policy version {version}",
        rule="a version is published only when its digest is acknowledged",
        way_out="resume the run; report this if it repeats",
    )
