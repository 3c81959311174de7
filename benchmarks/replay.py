"""Replay of 2 GiB as segments, beside pickle and np.savez: stall, saves, opening, memory.

    python benchmarks/replay.py [--segments N] [--directory PATH]

A ring of 84×84 frames, N full segments of 32 MiB (64 by default). After a first checkpoint 2
segments' worth of rows are appended and saved again, twice: once all is written by the save, once
the loop has called `store_segments` as they filled. Beside it the same rows are rewritten as a
whole, as libraries do that store a ring with pickle (protocol 5) or np.savez, each with fsync. All
times are of one process and one run, wall clock and CPU of the process; compare ratios.

* stall: how long `stage` blocks with the ring registered, and without it.
* written / new: bytes of the files that an incremental checkpoint added, by bytes of the new rows.
* open: choosing the checkpoint and restoring it into a fresh ring; then sampling 256 rows. First
  with nothing in the page cache (it was written past it), then once more.
* memory: how far the process's peak grew during the first save.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perdure.checkpoint import (
    ArraysComponent,
    Checkpointer,
    MemoryLedger,
    Registry,
    ReplayRing,
    StagedInfo,
)
from perdure.core.clock import SystemClock
from perdure.core.faults import NoFaults
from perdure.core.ids import CheckpointName, IncarnationNumber, LogPosition
from perdure.storage import PosixStorage

ONE = IncarnationNumber(1)
COLUMNS: dict[str, Any] = {
    "obs": ("u1", (84, 84)),
    "action": ("i8", ()),
    "reward": ("f4", ()),
    "done": ("?", ()),
}
ROW_BYTES = 84 * 84 + 8 + 4 + 1
SEGMENT_BYTES = 32 << 20
SEGMENT_ROWS = SEGMENT_BYTES // ROW_BYTES
NEW = 2
WEIGHTS_BYTES = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Of one action."""

    wall_s: float
    cpu_s: float


def cost_of(action: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


class Run:
    """An engine over a small model, with or without the ring."""

    def __init__(self, directory: Path, ring: ReplayRing, *, replay: bool = True) -> None:
        self.directory = directory
        self.ring = ring
        self.ledger = MemoryLedger()
        self.blocked_ms: list[float] = []
        registry = Registry()
        weights = {"w": np.zeros(WEIGHTS_BYTES, np.uint8)}
        registry.register("policy", ArraysComponent(weights), kind="model")
        if replay:
            registry.register("replay", ring, kind="experience")
        self.engine = Checkpointer(
            PosixStorage(directory),
            registry=registry,
            ledger=self.ledger,
            clock=SystemClock(),
            faults=NoFaults(),
            events=self._event,
        )

    def save(self, step: int) -> None:
        info = StagedInfo(LogPosition(ONE, 0, step), {"global_step": step}, {}, "dqn", "", "")
        self.engine.stage(CheckpointName("train", step, ONE), info=info, must=True)

    def _event(self, name: str, fields: dict[str, object]) -> None:
        if name == "checkpoint_staged":
            self.blocked_ms.append(float(str(fields["blocked_ms"])))


def rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.integers(0, 256, (count, 84, 84), np.uint8),
        "action": rng.integers(0, 18, count),
        "reward": rng.random(count, np.float32),
        "done": rng.random(count) < 0.01,
    }


def stalls(directory: Path, ring: ReplayRing, batch: dict[str, np.ndarray]) -> tuple[float, float]:
    """Milliseconds that staging blocks with the ring and without it; medians of 5."""
    found: list[float] = []
    for replay in (True, False):
        run = Run(directory / str(replay), ring, replay=replay)
        for step in range(6):
            ring.append({key: column[:100] for key, column in batch.items()})
            run.save(step)
        run.engine.close()
        found.append(float(np.median(run.blocked_ms[-5:])))
    return found[0], found[1]


def files_in(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def incremental(
    run: Run, step: int, batch: dict[str, np.ndarray], *, beforehand: bool
) -> tuple[Cost, Cost, float]:
    """The save, everything that storing two new segments took, bytes written by new bytes."""
    before = files_in(run.directory)
    beforehand_cost = Cost(0.0, 0.0)

    def store() -> None:
        assert run.engine.store_segments(ONE)
        assert run.engine.wait(600)

    for _ in range(NEW):
        run.ring.append(batch)
        if beforehand:
            cost = cost_of(store)
            beforehand_cost = Cost(
                beforehand_cost.wall_s + cost.wall_s, beforehand_cost.cpu_s + cost.cpu_s
            )
    save = cost_of(lambda: run.save(step))
    written = sum(size for path, size in files_in(run.directory).items() if path not in before)
    total = Cost(save.wall_s + beforehand_cost.wall_s, save.cpu_s + beforehand_cost.cpu_s)
    return save, total, (written - WEIGHTS_BYTES) / (NEW * SEGMENT_ROWS * ROW_BYTES)


class Growth:
    """How far the process's own memory grows from now on."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._start = self._peak()

    def bytes(self) -> int:
        return self._peak() - self._start

    def _peak(self) -> int:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) << 10


def rewritten(directory: Path, ring: ReplayRing) -> dict[str, Cost]:
    """The whole ring by the ways of others, each durable."""
    arrays = ring.rows(np.arange(ring.head, ring.total))

    def with_pickle() -> None:
        with (directory / "replay.pickle").open("wb") as file:
            pickle.dump(arrays, file, protocol=5)
            file.flush()
            os.fsync(file.fileno())

    def with_savez() -> None:
        with (directory / "replay.npz").open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())

    costs: dict[str, Cost] = {}
    for name, action in (("pickle", with_pickle), ("np.savez", with_savez)):
        costs[name] = cost_of(action)
        for path in directory.iterdir():
            path.unlink()
    return costs


def opened(run: Run) -> tuple[Cost, Cost]:
    """Choosing and restoring into a fresh ring; the first sample after it."""
    ring = new_ring(run.ring.capacity)
    fresh = Run(run.directory, ring)

    def restore() -> None:
        fresh.engine.restore(fresh.engine.choose(run.ledger.committed()))

    opening = cost_of(restore)
    sampling = cost_of(lambda: ring.sample(np.random.default_rng(1), 256))
    fresh.engine.close()
    return opening, sampling


def new_ring(capacity: int) -> ReplayRing:
    return ReplayRing(capacity, COLUMNS)


def measure(root: Path, segments: int) -> dict[str, Any]:
    ring = new_ring(SEGMENT_ROWS * segments)
    batch = rows(SEGMENT_ROWS)
    for _ in range(segments):
        ring.append(batch)
    run = Run(root / "run", ring)
    growth = Growth()
    first = cost_of(lambda: run.save(1))
    grown = growth.bytes()
    save, _, ratio = incremental(run, 2, batch, beforehand=False)
    late, total, _ = incremental(run, 3, batch, beforehand=True)
    run.engine.close()
    cold, warm = opened(run), opened(run)
    (root / "peers").mkdir()
    peers = rewritten(root / "peers", ring)
    blocked, without = stalls(root / "stall", ring, batch)
    size = segments * SEGMENT_ROWS * ROW_BYTES
    figures = {
        "replay_bytes": size,
        "stall_with_replay_ms": blocked,
        "stall_without_ms": without,
        "first_save_s": first.wall_s,
        "first_save_cpu_s_per_gb": first.cpu_s / size * 1e9,
        "first_save_peak_growth_in_segments": grown / SEGMENT_BYTES,
        "written_by_new_bytes": ratio,
        "incremental_save_s": save.wall_s,
        "incremental_save_cpu_s": save.cpu_s,
        "stored_beforehand_save_s": late.wall_s,
        "stored_beforehand_save_cpu_s": late.cpu_s,
        "stored_beforehand_all_cpu_s": total.cpu_s,
        "open_cold_s": cold[0].wall_s,
        "open_cold_first_sample_s": cold[1].wall_s,
        "open_warm_s": warm[0].wall_s,
        "open_warm_first_sample_s": warm[1].wall_s,
    }
    for name, peer in peers.items():
        figures[f"{name}_s"] = peer.wall_s
        figures[f"{name}_cpu_s"] = peer.cpu_s
        figures[f"{name}_s / incremental_save_s"] = peer.wall_s / save.wall_s
        figures[f"{name}_cpu_s / incremental_save_cpu_s"] = peer.cpu_s / save.cpu_s
        figures[f"{name}_s / stored_beforehand_save_s"] = peer.wall_s / late.wall_s
        figures[f"{name}_cpu_s / stored_beforehand_all_cpu_s"] = peer.cpu_s / total.cpu_s
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=64)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        figures = measure(Path(root), options.segments)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
