"""The engine processes of a run: how they are made, watched and replaced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perdure.core.events import EventSink
from perdure.models import ModelConfig
from perdure.publish import Publication, PublicationOptions
from perdure.rollout import (
    EmbeddedEngine,
    EngineOptions,
    EnginePool,
    ProcessEngine,
    ProcessOptions,
    ReplacementOptions,
)
from perdure.runtime.fleet import EngineFleet
from perdure.runtime.guest import GuestEngine
from perdure.trainers.config import RolloutConfig


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """Engines of one model and one recipe.

    Attributes:
        threads: That each computes with.
        weights_dir: Where published weights lie.
    """

    model: ModelConfig
    options: EngineOptions
    rollout: RolloutConfig
    threads: int
    weights_dir: Path

    @property
    def publication_options(self) -> PublicationOptions:
        timeout_s = self.rollout.process.acknowledge_timeout_s
        return PublicationOptions(acknowledge_timeout_s=timeout_s)

    def fleet(self, pool: EnginePool, publication: Publication, events: EventSink) -> EngineFleet:
        """The processes of the recipe."""
        return EngineFleet(
            pool,
            publication,
            names=[f"engine-{index}" for index in range(self.rollout.engines)],
            build=self._start,
            options=ReplacementOptions(max_replacements=self.rollout.process.max_replacements),
            events=events,
        )

    def guest(self, pool: EnginePool, publication: Publication) -> GuestEngine:
        """An engine in this process, on the learner's devices."""
        return GuestEngine(
            pool,
            publication,
            build=lambda: EmbeddedEngine(self.model, self.options),
            slots=self.options.slots,
        )

    async def _start(self, name: str) -> ProcessEngine:
        del name
        process = self.rollout.process
        return await ProcessEngine.start(
            self.model,
            self.options,
            process_options=ProcessOptions(
                threads=self.threads,
                start_timeout_s=process.start_timeout_s,
                heartbeat_s=process.heartbeat_s,
                silence_timeout_s=process.silence_timeout_s,
            ),
        )
