"""Write ``tests/golden/replay-v1`` again: only before a format is released, never afterwards.

    python tests/golden/make_replay.py

Two checkpoints of a wrapped ring with episodes, of a ring in flat arrays and of priorities.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from perdure.checkpoint import (
    Checkpointer,
    MemoryLedger,
    Priorities,
    Registry,
    ReplayArrays,
    ReplayRing,
    RingOptions,
    StagedInfo,
)
from perdure.core.clock import ManualClock
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import PosixStorage

GOLDEN = Path(__file__).parent / "replay-v1"
ONE = IncarnationNumber(1)
COLUMNS = {"obs": ("u1", (2, 3)), "reward": ("f4", ()), "done": ("?", ()), "episode": ("i8", ())}


class Flat:
    """A ring in arrays, as other libraries keep it."""

    def __init__(self) -> None:
        self.arrays = {"actions": np.zeros((5, 1), np.int64), "dones": np.zeros(5, np.float32)}
        self.pos, self.full, self.added = 0, False, 0

    def add(self, value: int) -> None:
        for array in self.arrays.values():
            array[self.pos] = value
        self.added += 1
        self.pos, self.full = self.added % 5, self.added >= 5


class Parts:
    """The components, fresh."""

    def __init__(self) -> None:
        options = RingOptions(segment_bytes=5 * 19, episode="episode")
        self.ring = ReplayRing(10, COLUMNS, options=options)
        self.priorities = Priorities(self.ring)
        self.flat = Flat()
        self.registry = Registry()
        self.registry.register("replay", self.ring, kind="experience")
        flat = ReplayArrays(self.flat.arrays, self.flat, total=lambda: self.flat.added)
        self.registry.register("agents/1/replay", flat, kind="experience")
        self.registry.register("priorities", self.priorities, kind="tensors")


def rows(first: int, stop: int) -> dict[str, np.ndarray]:
    """Rows whose contents say which they are; episodes have 3."""
    numbers = np.arange(first, stop)
    return {
        "obs": (numbers[:, None, None] + np.arange(6).reshape(2, 3)).astype(np.uint8),
        "reward": numbers.astype(np.float32) / 4,
        "done": numbers % 3 == 2,
        "episode": numbers // 3,
    }


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    parts, ledger = Parts(), MemoryLedger()
    engine = Checkpointer(
        PosixStorage(GOLDEN),
        registry=parts.registry,
        ledger=ledger,
        clock=ManualClock(),
        faults=NoFaults(),
        events=ignore_events,
    )
    for step, total in ((1, 7), (2, 12)):
        parts.ring.append(rows(parts.ring.total, total))
        for value in range(parts.flat.added, total):
            parts.flat.add(value)
        parts.priorities.update(np.array([total - 1]), np.array([2.5]))
        info = StagedInfo(LogPosition(ONE, 0, step), {"global_step": step}, {}, "dqn", "", "")
        engine.stage(CheckpointName("train", step, ONE), info=info, must=True)
    engine.close()
    committed = [
        {
            "directory": record.directory,
            "phase": record.phase,
            "step": record.step,
            "manifest_digest": record.manifest_digest,
            "position": [1, 0, record.step],
        }
        for record in ledger.committed()
    ]
    PosixStorage(GOLDEN).write_atomic("ledger.json", json.dumps(committed, indent=1).encode())


if __name__ == "__main__":
    main()
