"""SIGKILL of controllers and of engines on a cluster, in the asynchronous modes.

Both die at random fault points; engines outlive their controller, and the next one finds them or
does without. What has to hold is what holds on one machine: nothing that was durable is missing,
the audit proves the run, and the logged batches give the weights of every step, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from async_cases import BUSY, MODES, ONLY_RESUMED, POINTS, strike
from cluster_runs import ClusterRun, settings_of
from drill_tools import KILLED, ForkServer, next_action, run_to_end
from engine_kills import killed_engines
from ray_cluster import QUIET, Cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("ray"), *QUIET]
VICTIMS = ("controller", "engine", "both", "orphan")
"""Processes that a life loses; an orphan is an engine whose controller has just been killed."""


@dataclass(kw_only=True)
class Drill(ClusterRun):
    """One run, struck at fault points."""

    server: ForkServer
    rng: random.Random
    settings: tuple[str, ...]

    def live(self, victim: str) -> bool:
        """One more life; returns whether it has lost what it was to lose."""
        before, published = len(self._engines_killed()), self.publications
        action = next_action(self.run)
        points = [at for at in POINTS if action == "resume" or at not in ONLY_RESUMED]
        ended = self.server.run(
            action,
            self.run,
            plan=[] if victim == "engine" else [strike(self.rng, points)],
            kill_engines=[strike(self.rng, BUSY)] if victim in ("engine", "both") else [],
            engines_under=self.cluster.process.pid,
            overrides=self.settings,
        )
        assert ended.status in (0, KILLED), ended.log
        died, lost = ended.status == KILLED, len(self._engines_killed()) - before
        self.note_life(died=died, served=self.publications > published, engines_lost=lost)
        if victim == "orphan":
            return died and self._kill_an_orphan()
        return died is (victim != "engine") and bool(lost) is (victim != "controller")

    def finish(self) -> None:
        """Let the run come to its end, and prove it."""
        if not self.complete:
            run_to_end(self.server, self.run, overrides=self.settings)
        self.left.difference_update(self._engines_killed())
        self.prove_end()

    def _kill_an_orphan(self) -> bool:
        if not (orphans := self.engines()):
            return False
        victim = self.rng.choice(orphans)
        os.kill(victim, signal.SIGKILL)
        self.left.discard(victim)
        self.killed["engine"] += 1
        return True

    def _engines_killed(self) -> list[int]:
        """Process ids of those killed at fault points, in all lives."""
        return killed_engines(Path(f"{self.run}.child.log"))


@pytest.mark.parametrize(
    ("mode", "victims"),
    [("colocate_async", ("controller", "orphan")), ("separate_async", ("both", "controller"))],
)
def test_killed_on_a_cluster(
    server: ForkServer, ray_cluster: Cluster, tmp_path: Path, mode: str, victims: tuple[str, ...]
) -> None:
    kill_one_after_another(server, ray_cluster, tmp_path, mode, seed=1, victims=victims)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1002))
@pytest.mark.parametrize("mode", MODES)
def test_soak_of_kills_on_a_cluster(
    server: ForkServer, ray_cluster: Cluster, tmp_path: Path, mode: str, seed: int
) -> None:
    victims = random.Random(f"{mode} {seed}").sample(VICTIMS * 2, k=8)
    killed = kill_one_after_another(server, ray_cluster, tmp_path, mode, seed=seed, victims=victims)
    assert killed["controller"] >= 6
    assert killed["engine"] >= 6
    print(f"{mode} {seed}: {dict(killed)}")


def kill_one_after_another(
    server: ForkServer,
    cluster: Cluster,
    runs: Path,
    mode: str,
    *,
    seed: int,
    victims: Sequence[str],
) -> Counter[str]:
    """A life that passes the points of its faults unharmed is followed by another.

    A run that is complete before all victims are is proven and followed by another as well.
    """
    rng, killed = random.Random(f"ray {mode} {seed}"), Counter[str]()
    numbers, left = count(), list(victims)
    drill = None
    while left:
        if drill is None or drill.complete:
            run = runs / f"run-{next(numbers)}"
            drill = Drill(
                cluster=cluster,
                run=run,
                killed=killed,
                server=server,
                rng=rng,
                settings=settings_of(mode, seed, cluster),
            )
        if drill.live(left[0]):
            left.pop(0)
        if drill.complete or not left:
            drill.finish()
    return killed
