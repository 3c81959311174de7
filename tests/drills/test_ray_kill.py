"""SIGKILL of controllers and of engines on a cluster, in the asynchronous modes.

Both die at random fault points; engines outlive their controller, and the next one finds them or
does without. What has to hold is what holds on one machine: nothing that was durable is missing,
the audit proves the run, and the logged batches give the weights of every step, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from async_cases import BUSY, MODES, POINTS, note_durable, overrides, prove, strike
from drill_tools import KILLED, ForkServer, next_action, run_to_end
from engine_kills import ENGINE_KILLED, engines_of
from logged_batches import Acknowledged
from ray_cluster import QUIET, Cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("ray"), *QUIET]
VICTIMS = ("controller", "engine", "both", "orphan")
"""Processes that a life loses; an orphan is an engine whose controller has just been killed."""
ONLY_RESUMED = {"restore_done", "redo_step", "redo_done"}
WATCH = ("rollout.process.heartbeat_s=0.2", "rollout.process.silence_timeout_s=20")
ENGINES = {"colocate_async": 1, "separate_async": 2}


@dataclass
class Drill:
    """One run, struck in life after life of its controller.

    Attributes:
        killed: Processes, by kind.
        complete: The run has come to its end.
        left: Engines (process ids) that served a killed controller and outlived it.
    """

    server: ForkServer
    cluster: Cluster
    run: Path
    rng: random.Random
    settings: tuple[str, ...]
    killed: Counter[str]
    complete: bool = False
    left: set[int] = field(default_factory=set[int])
    _durable: Acknowledged = field(default_factory=Acknowledged)

    def live(self, victim: str) -> bool:
        """One more life; returns whether it has lost what it was to lose."""
        before, published = len(self._engines_killed()), len(self._events("published"))
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
        self.complete = not died
        note_durable(self.run, self._durable)
        self.killed.update(controller=int(died), engine=lost)
        if died and not lost and len(self._events("published")) > published:
            survivors = self._engines()
            assert survivors, "engines outlive their controller"
            self.left.update(survivors)
        if victim == "orphan":
            return died and self._kill_an_orphan()
        return died is (victim != "engine") and bool(lost) is (victim != "controller")

    def finish(self) -> None:
        """Let the run come to its end, and prove it."""
        if not self.complete:
            run_to_end(self.server, self.run, overrides=self.settings)
        found = {event["pid"] for event in self._events("engine_found")}
        assert found >= self.left.difference(self._engines_killed()), (
            "a controller did without an engine that was there"
        )
        self.killed["found"] += len(found)
        deadline_s = time.monotonic() + 60
        while engines := self._engines():
            assert time.monotonic() < deadline_s, f"engines are left: {engines}"
            time.sleep(0.05)
        prove(self.run, self._durable)

    def _kill_an_orphan(self) -> bool:
        if not (orphans := self._engines()):
            return False
        victim = self.rng.choice(orphans)
        os.kill(victim, signal.SIGKILL)
        self.left.discard(victim)
        self.killed["engine"] += 1
        return True

    def _engines(self) -> list[int]:
        return engines_of(self.cluster.process.pid)

    def _engines_killed(self) -> list[int]:
        """Process ids of those killed at fault points, in all lives."""
        log = Path(f"{self.run}.child.log")
        text = log.read_text() if log.exists() else ""
        return [int(pid) for pid in re.findall(rf"^{ENGINE_KILLED} (\d+) at", text, re.MULTILINE)]

    def _events(self, name: str) -> list[dict[str, Any]]:
        file = self.run / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]


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
    where = ("runtime=ray", f"ray.address={cluster.address}", f"rollout.engines={ENGINES[mode]}")
    settings = (*overrides(mode, seed), *WATCH, *where)
    numbers, left = count(), list(victims)
    drill = None
    while left:
        if drill is None or drill.complete:
            run = runs / f"run-{next(numbers)}"
            drill = Drill(server, cluster, run, rng, settings, killed)
        if drill.live(left[0]):
            left.pop(0)
        if drill.complete or not left:
            drill.finish()
    return killed
