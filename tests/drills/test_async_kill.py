"""SIGKILL of controllers and engines at random fault points of the asynchronous modes.

A seed decides who dies, and each case goes on until all of them have: a controller by its own
status, an engine by what the run tells of its loss. Where they die is random. Which sessions end up
in which batch depends on timing, so no two runs are equal. What has to hold: nothing that was
durable when a process died is missing afterwards, the audit proves the run, and who trains the
logged batches in their order gets the weights of every step, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from async_cases import (
    BUSY,
    MODES,
    ONLY_RESUMED,
    POINTS,
    note_durable,
    overrides,
    prove,
    strike,
)
from drill_tools import KILLED, ForkServer, next_action, run_to_end
from engine_kills import killed_engines, loss_of, told_of
from logged_batches import Acknowledged

MAX_LIVES = 20
"""Of controllers, until a victim has died: a life may end before the point of its fault."""


@dataclass
class Drill:
    """One run, struck in life after life of its controller.

    Attributes:
        complete: The run has come to its end.
    """

    server: ForkServer
    run: Path
    rng: random.Random
    settings: tuple[str, ...]
    complete: bool = False
    _durable: Acknowledged = field(default_factory=Acknowledged)

    def live(self, victim: str) -> bool:
        """One more life; returns whether it has lost what it was to lose."""
        action, before = next_action(self.run), len(self._killed_engines())
        plan, engines = self._strikes(victim, action)
        ended = self.server.run(
            action, self.run, plan=plan, kill_engines=engines, overrides=self.settings
        )
        died = ended.status == KILLED
        assert ended.status in (0, KILLED), ended.log
        assert not died or victim != "engine", f"nobody was to kill the controller: {ended.log}"
        self.complete = not died
        note_durable(self.run, self._durable)
        lost = self._killed_engines()[before:]
        assert len(lost) <= len(engines)
        if victim == "engine":
            return bool(lost) and self._was_replaced(lost[0])
        if victim == "both" and died:
            assert [loss_of(self.run, pid) is not None for pid in lost] == [True]
        return died

    def finish(self) -> None:
        """Let the run come to its end, and prove it."""
        if not self.complete:
            run_to_end(self.server, self.run, overrides=self.settings)
        prove(self.run, self._durable)

    def _strikes(
        self, victim: str, action: str
    ) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """Faults of the controller, and of its engines."""
        if victim == "controller":
            points = [at for at in POINTS if action == "resume" or at not in ONLY_RESUMED]
            return [strike(self.rng, points)], []
        engine = strike(self.rng, BUSY)
        if victim == "both":
            engine["controller_after"] = self.rng.randint(1, 40)
        return [], [engine]

    def _was_replaced(self, engine: int) -> bool:
        """Whether the run tells that it missed the process and put another one in its place."""
        loss = loss_of(self.run, engine)
        replaced = told_of(self.run, "engine_replaced")
        return loss is not None and any(one["wall_s"] >= loss["wall_s"] for one in replaced)

    def _killed_engines(self) -> list[int]:
        return killed_engines(Path(f"{self.run}.child.log"))


def victims_of(mode: str, seed: int, controllers: int) -> list[str]:
    """Who dies, in order: so many controllers and, where engines are processes, some of those.

    Every second controller loses an engine before it dies itself, and at last one goes on to the
    end of the run without the engine that it began with.
    """
    if mode != "separate_async":
        return ["controller"] * controllers
    return [("both", "controller")[(seed + i) % 2] for i in range(controllers)] + ["engine"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_points(server: ForkServer, tmp_path: Path, mode: str, seed: int) -> None:
    kill_one_after_another(server, tmp_path, mode, seed=seed, victims=victims_of(mode, seed, 2))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1020))
@pytest.mark.parametrize("mode", MODES)
def test_soak_of_kills(server: ForkServer, tmp_path: Path, mode: str, seed: int) -> None:
    kill_one_after_another(server, tmp_path, mode, seed=seed, victims=victims_of(mode, seed, 5))


def kill_one_after_another(
    server: ForkServer, runs: Path, mode: str, *, seed: int, victims: Sequence[str]
) -> None:
    """A victim that outlives the point of its fault is struck again in another life.

    A run that is complete before all victims are is proven and followed by another.
    """
    rng, drills = random.Random(f"{mode} {seed}"), list[Drill]()
    for victim in victims:
        for _ in range(MAX_LIVES):
            if not drills or drills[-1].complete:
                run = runs / f"run-{len(drills) + 1}"
                drills.append(Drill(server, run, rng, overrides(mode, seed)))
            died = drills[-1].live(victim)
            if drills[-1].complete:
                drills[-1].finish()
            if died:
                break
        else:
            raise AssertionError(f"no {victim} died in {MAX_LIVES} lives")
    if not drills[-1].complete:
        drills[-1].finish()
