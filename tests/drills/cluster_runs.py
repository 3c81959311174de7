"""Runs on a cluster whose controllers are killed, and what has to hold of them after each death."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from async_cases import note_durable, overrides, prove
from engine_kills import engines_of, told_of
from logged_batches import Acknowledged
from ray_cluster import Cluster

ENGINES = {"colocate_async": 1, "separate_async": 2}


def settings_of(mode: str, seed: int, cluster: Cluster) -> tuple[str, ...]:
    """Overrides of the drill recipe."""
    return (
        *overrides(mode, seed),
        "rollout.process.heartbeat_s=0.2",
        "rollout.process.silence_timeout_s=20",
        "runtime=ray",
        f"ray.address={cluster.address}",
        f"rollout.engines={ENGINES[mode]}",
    )


@dataclass(kw_only=True)
class ClusterRun:
    """One run, in life after life of its controller.

    Attributes:
        killed: Processes, by kind.
        complete: The run has come to its end.
        left: Engines (process ids) that served a killed controller and outlived it.
    """

    cluster: Cluster
    run: Path
    killed: Counter[str]
    complete: bool = False
    left: set[int] = field(default_factory=set[int])
    _durable: Acknowledged = field(default_factory=Acknowledged)

    @property
    def publications(self) -> int:
        """In all lives."""
        return len(told_of(self.run, "published"))

    def note_life(self, *, died: bool, served: bool, engines_lost: int = 0) -> None:
        """Assert that it has lost nothing, and note who outlives it.

        Args:
            served: Its engines did, until it died.
        """
        self.complete = not died
        note_durable(self.run, self._durable)
        self.killed.update(controller=int(died), engine=engines_lost)
        if died and served and not engines_lost:
            survivors = self.engines()
            assert survivors, "engines outlive their controller"
            self.left.update(survivors)

    def prove_end(self) -> None:
        """Assert of a complete run that who was left was found, nobody is there, all is proven."""
        found = {event["pid"] for event in told_of(self.run, "engine_found")}
        assert found >= self.left, "a controller did without an engine that was there"
        self.killed["found"] += len(found)
        deadline_s = time.monotonic() + 60
        while engines := self.engines():
            assert time.monotonic() < deadline_s, f"engines are left: {engines}"
            time.sleep(0.05)
        prove(self.run, self._durable)

    def engines(self) -> list[int]:
        return engines_of(self.cluster.process.pid)
