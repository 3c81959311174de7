"""SIGKILL of the engine processes of a run at the fault points of its controller."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.core.faults import FaultPlan, FaultPoint

ENGINE_KILLED = "ENGINE KILLED"


def engines_of(parent: int) -> list[int]:
    """Process ids of the engines that a controller has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if is_engine(int(child))]


def is_engine(pid: int) -> bool:
    try:
        return b"perdure.rollout.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def install(plan: FaultPlan, strikes: Sequence[dict[str, Any]], *, said: Path) -> None:
    """Have the oldest engine of this process killed at ``{"point": …, "hit": …}``; says so."""
    due = {(FaultPoint(strike["point"]), strike["hit"]) for strike in strikes}
    hits = Counter[FaultPoint]()

    def observe(point: FaultPoint) -> None:
        hits[point] += 1
        if (point, hits[point]) in due and (engines := engines_of(os.getpid())):
            os.kill(engines[0], signal.SIGKILL)
            with said.open("a") as log:
                log.write(f"{ENGINE_KILLED} {engines[0]} at {point.value}\n")

    plan.observers.append(observe)
