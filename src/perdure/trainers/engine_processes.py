"""The engine processes of a run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.models import ModelConfig
from perdure.publish import FileTransport
from perdure.rollout import EngineOptions, ProcessEngine, ProcessOptions
from perdure.trainers.config import RolloutConfig


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """``runtime.fleet.EngineSource``: engines of one model and one recipe.

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
    def names(self) -> Sequence[str]:
        return engine_names(self.rollout)

    def transport(self) -> FileTransport:
        return FileTransport(self.weights_dir)

    async def start(self, name: str) -> ProcessEngine:
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

    async def watch(self) -> None:
        """They stand on this process."""

    async def close(self) -> None:
        """They had nothing of their own."""


def engine_names(rollout: RolloutConfig) -> Sequence[str]:
    """Of the engines outside the learner's process."""
    return [f"engine-{index}" for index in range(rollout.engines)]
