"""Replay of 2 GiB as segments, beside pickle and np.savez: stall, saves, opening, memory.

    python benchmarks/replay.py [--segments N] [--rounds R] [--directory PATH]

A ring of 84×84 frames, N full segments of 32 MiB (64 by default). After a first checkpoint each
round appends 2 segments' worth of rows and saves, twice: once all is written by the save, once the
loop has called `store_segments` as they filled. Beside it, in the same round, the same rows are
rewritten as a whole, as libraries do that store a ring with pickle (protocol 5) or np.savez, each
with fsync, and the bytes of 2 segments are written raw (O_DIRECT, one file, one fsync): no way of
saving them can be faster than that. All times are of one process and one run; CPU is that of
the process, all threads. Medians over the rounds, and the best round; compare ratios.

* incremental: everything from the call of `stage(must=True)` until the commit is acknowledged. The
  rows of both segments are written, fsynced, read back from the disk and compared, then the rest of
  the checkpoint. `returned` adds what the call does after the commit: the oldest checkpoint and
  its 2 segments are deleted. CPU seconds are until then.
* stored_beforehand: the same calls when the segments were stored while the ring filled: what is
  left to the save itself. Its `all_cpu_s` adds what storing them took.
* stall: how long `stage` blocks with the ring registered, and without it.
* written / new: bytes of the files that an incremental checkpoint added, by bytes of the new rows.
* open: choosing the checkpoint and restoring it into a fresh ring; then sampling 256 rows. First
  with nothing in the page cache, then once more.
* memory: how far the process's peak grew during the first save, and during one whose newest segment
  is nearly full, in segments.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import pickle
import statistics
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
PIECE_BYTES = 8 << 20
NEW = 2
WEIGHTS_BYTES = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Of one action."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def cost_of(action: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


@dataclass(frozen=True)
class Save:
    """One incremental save."""

    committed_s: float
    returned: Cost
    beforehand: Cost
    written_by_new: float


class Run:
    """An engine over a small model, with or without the ring."""

    def __init__(self, directory: Path, ring: ReplayRing, *, replay: bool = True) -> None:
        self.directory = directory
        self.ring = ring
        self.ledger = MemoryLedger()
        self.blocked_ms: list[float] = []
        self.committed_at_s = 0.0
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
        elif name == "checkpoint_committed":
            self.committed_at_s = time.perf_counter()


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


def incremental(run: Run, step: int, batch: dict[str, np.ndarray], *, beforehand: bool) -> Save:
    """Two new segments and the save that names them."""
    before = files_in(run.directory)
    stored = Cost(0.0, 0.0)

    def store() -> None:
        assert run.engine.store_segments(ONE)
        assert run.engine.wait(600)

    for _ in range(NEW):
        run.ring.append(batch)
        if beforehand:
            stored += cost_of(store)
    started_s = time.perf_counter()
    returned = cost_of(lambda: run.save(step))
    written = sum(size for path, size in files_in(run.directory).items() if path not in before)
    ratio = (written - WEIGHTS_BYTES) / (NEW * SEGMENT_ROWS * ROW_BYTES)
    return Save(run.committed_at_s - started_s, returned, stored, ratio)


def raw(directory: Path) -> Cost:
    """The bytes of the new segments, past the page cache, and one fsync."""
    memory = mmap.mmap(-1, SEGMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(np.random.default_rng(0).bytes(SEGMENT_BYTES))
    path = directory / "raw"

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        for number in range(NEW):
            for start in range(0, SEGMENT_BYTES, PIECE_BYTES):
                piece = memoryview(memory)[start : start + PIECE_BYTES]
                os.pwrite(descriptor, piece, number * SEGMENT_BYTES + start)
        os.fsync(descriptor)
        os.close(descriptor)

    cost = cost_of(write)
    path.unlink()
    return cost


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


class Rounds:
    """What was measured several times."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def add_save(self, name: str, save: Save) -> None:
        self.add(f"{name}_committed_s", save.committed_s)
        self.add(f"{name}_returned_s", save.returned.wall_s)
        self.add(f"{name}_cpu_s", save.returned.cpu_s)
        self.add(f"{name}_all_cpu_s", save.returned.cpu_s + save.beforehand.cpu_s)

    def figures(self) -> dict[str, float]:
        """Medians and least values, and how many times those of saves the peers take."""
        found: dict[str, float] = {}
        for way, of in (("median", statistics.median), ("best", min)):
            least = {name: float(of(values)) for name, values in self.values.items()}
            found |= {f"{name} {way}": value for name, value in least.items()}
            for peer in ("pickle", "np.savez"):
                for save in ("incremental", "stored_beforehand"):
                    for unit, ours in (("s", "committed_s"), ("cpu_s", "all_cpu_s")):
                        ratio = least[f"{peer}_{unit}"] / least[f"{save}_{ours}"]
                        found[f"{peer}_{unit} / {save}_{ours} {way}"] = ratio
                found[f"{peer}_s / raw_s {way}"] = least[f"{peer}_s"] / least["raw_s"]
        return found


def one_round(run: Run, root: Path, step: int, batch: dict[str, np.ndarray], out: Rounds) -> None:
    out.add("raw_s", raw(root).wall_s)
    save = incremental(run, step, batch, beforehand=False)
    out.add_save("incremental", save)
    out.add("written_by_new_bytes", save.written_by_new)
    out.add_save("stored_beforehand", incremental(run, step + 1, batch, beforehand=True))
    for name, peer in rewritten(root, run.ring).items():
        out.add(f"{name}_s", peer.wall_s)
        out.add(f"{name}_cpu_s", peer.cpu_s)


def measure(root: Path, segments: int, rounds: int) -> dict[str, Any]:
    ring = new_ring(SEGMENT_ROWS * segments)
    batch = rows(SEGMENT_ROWS)
    for _ in range(segments):
        ring.append(batch)
    run = Run(root / "run", ring)
    growth = Growth()
    first = cost_of(lambda: run.save(1))
    grown = growth.bytes()
    ring.append({name: column[: SEGMENT_ROWS - 1] for name, column in batch.items()})
    growth = Growth()
    run.save(2)
    tail_grown = growth.bytes()
    ring.append({name: column[:1] for name, column in batch.items()})
    run.save(3)
    (root / "beside").mkdir()
    taken = Rounds()
    for number in range(rounds):
        one_round(run, root / "beside", 10 + 2 * number, batch, taken)
    run.engine.close()
    cold, warm = opened(run), opened(run)
    blocked, without = stalls(root / "stall", ring, batch)
    size = segments * SEGMENT_ROWS * ROW_BYTES
    return {
        "replay_bytes": size,
        "stall_with_replay_ms": blocked,
        "stall_without_ms": without,
        "first_save_s": first.wall_s,
        "first_save_cpu_s_per_gb": first.cpu_s / size * 1e9,
        "first_save_peak_growth_in_segments": grown / SEGMENT_BYTES,
        "tail_save_peak_growth_in_segments": tail_grown / SEGMENT_BYTES,
        "open_cold_s": cold[0].wall_s,
        "open_cold_first_sample_s": cold[1].wall_s,
        "open_warm_s": warm[0].wall_s,
        "open_warm_first_sample_s": warm[1].wall_s,
        **taken.figures(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        figures = measure(Path(root), options.segments, options.rounds)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
