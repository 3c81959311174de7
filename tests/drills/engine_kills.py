"""SIGKILL of the engine processes of a run at the fault points of its controller."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_cluster import descendants

from perdure.core.faults import FaultPlan, FaultPoint

ENGINE_KILLED = "ENGINE KILLED"


def engines_of(parent: int) -> list[int]:
    """Process ids of the engines that descend from a controller or a cluster."""
    return [pid for pid in descendants(parent) if is_engine(pid)]


def is_engine(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"perdure.rollout.engine_process" in command or command.startswith(b"ray::EngineHost")


def killed_engines(log: Path) -> list[int]:
    """Process ids of the engines that were killed at fault points, in order."""
    text = log.read_text() if log.exists() else ""
    return [int(pid) for pid in re.findall(rf"^{ENGINE_KILLED} (\d+) at", text, re.MULTILINE)]


def told_of(run: Path, name: str) -> list[dict[str, Any]]:
    """The events of a run that have this name."""
    file = run / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    events = (json.loads(line) for line in lines if line.endswith("\n"))
    return [event for event in events if event["event"] == name]


def loss_of(run: Path, engine: int) -> dict[str, Any] | None:
    """The event by which a controller told that it missed this process; None: it has not."""
    losses = told_of(run, "engine_lost")
    return next((loss for loss in losses if f" {engine} died" in loss["reason"]), None)


def install(
    plan: FaultPlan,
    strikes: Sequence[dict[str, Any]],
    *,
    run: Path,
    under: int | None,
    said: Path,
) -> None:
    """Have engines of ``run`` killed, and then perhaps its controller.

    A strike is ``{"point": …, "hit": …}``: the oldest engine that descends from process ``under``
    (None: from this one) dies there, and ``said`` gets a line. Hits count from the first
    publication on: before it engines are starting, and one that dies then ends the run. With
    ``"controller_after": n`` this process dies as well, at the n-th point that it passes after the
    run's events tell of the loss.
    """
    due = {(FaultPoint(strike["point"]), strike["hit"]): strike for strike in strikes}
    hits = Counter[FaultPoint]()
    follow: dict[int, int] = {}

    def observe(point: FaultPoint) -> None:
        for engine, points in follow.items():
            if loss_of(run, engine) is not None:
                follow[engine] = points - 1
                if points == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        if point is FaultPoint.WEIGHTS_PUBLISHED or hits[FaultPoint.WEIGHTS_PUBLISHED]:
            hits[point] += 1
        strike = due.get((point, hits[point]))
        if strike is None or not (engines := engines_of(under or os.getpid())):
            return
        os.kill(engines[0], signal.SIGKILL)
        with said.open("a") as log:
            log.write(f"{ENGINE_KILLED} {engines[0]} at {point.value}\n")
        if "controller_after" in strike:
            follow[engines[0]] = strike["controller_after"]

    plan.observers.append(observe)
