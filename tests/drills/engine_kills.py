"""SIGKILL of the engine processes of a run at the fault points of its controller."""

from __future__ import annotations

import os
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


def install(
    plan: FaultPlan, strikes: Sequence[dict[str, Any]], *, under: int | None, said: Path
) -> None:
    """Have an engine killed at ``{"point": …, "hit": …}``; says so.

    It is the oldest that descends from process ``under``; None: from this one.
    """
    due = {(FaultPoint(strike["point"]), strike["hit"]) for strike in strikes}
    hits = Counter[FaultPoint]()

    def observe(point: FaultPoint) -> None:
        hits[point] += 1
        if (point, hits[point]) in due and (engines := engines_of(under or os.getpid())):
            os.kill(engines[0], signal.SIGKILL)
            with said.open("a") as log:
                log.write(f"{ENGINE_KILLED} {engines[0]} at {point.value}\n")

    plan.observers.append(observe)
