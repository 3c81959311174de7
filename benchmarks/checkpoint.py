"""Saving a training state: perdure beside torch.save, safetensors, DCP and Orbax.

    python benchmarks/checkpoint.py [--bytes N] [--rounds R] [--only NAME …] [--json FILE]

The state is a module and its AdamW, N bytes together (default 1 GiB), float32, on the CPU. A method
that is not installed is named and left out. Every method saves once to warm up and is then measured
in R rounds (default 3); each round saves twice, once while nothing else runs and once beside a
training loop. Yardsticks are taken in the same round, just before, in the same process:

* *memcpy*: the state copied with torch, one thread, into memory touched before.
* *raw*: the same bytes written with O_DIRECT in pieces of 8 MiB to a new file, and fsync.

Figures, each the median over the rounds, its best round below it (``p95`` is the largest of few):

* ``blocked``: seconds until the call returns, beside the loop / memcpy.
* ``lost``: training time that the save cost / memcpy: blocked, plus what the steps of the loop took
  longer (their mean) than in the quiet seconds before, from the return until the save is complete.
* ``cpu_s_per_gb``: CPU seconds of this process and of its children during the quiet save, per 1e9
  bytes: copying, checksums, writing and, where the method does so, reading back.
* ``durable``: seconds of *raw* / seconds until the bytes are on the disk with fsync, quiet, from
  the return of the call if the method writes behind it, from the call if it does not. What is
  written is the same, so this is the ratio of the rates. ``complete``: the same until the save is
  complete; for perdure that is after everything was read back from the disk, and the commit.
* ``stalls``: gaps of more than 50 ms that a thread sees which sleeps 1 ms at a time, from the call
  until the save is complete, beside the loop, without what it waited for a core (on Linux);
  ``quiet_stalls``: the same over the quiet seconds before, per save of this length.
* ``worst_step_ms``: the longest step of the loop meanwhile.
* ``peak_extra``: (largest proportional set size of this process and its children during
  the first save − before the method was built) / bytes of the state. Shared pages count once.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from checkpoint_peers import BUILDERS, Method, State, built

GB = 1e9
PIECE_BYTES = 8 << 20
STALL_S = 0.050
QUIET_S = 1.5
TARGETS = {
    "blocked": 1.2,
    "blocked_p95": 1.6,
    "lost": 3.0,
    "cpu_s_per_gb": 0.35,
    "durable": 0.8,
    "stalls": 0.0,
    "peak_extra": 2.0,
}


HIGHER_IS_BETTER = ("durable", "complete", "raw_gb_per_s")


@dataclass
class Round:
    """What one round of one method gave, in seconds and CPU seconds."""

    memcpy_s: float
    raw_s: float
    quiet: Quiet
    beside: Beside


@dataclass
class Quiet:
    """A save while nothing else runs."""

    blocked_s: float
    durable_s: float
    complete_s: float
    cpu_s: float


@dataclass
class Beside:
    """A save beside a training loop."""

    blocked_s: float
    complete_s: float
    slowed_s: float
    worst_step_s: float
    stalls: int
    quiet_stalls: float


@dataclass
class Sleeper:
    """A thread that sleeps 1 ms at a time and counts how often it was kept for longer."""

    stalls: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last, waited = time.perf_counter(), waited_for_core_s()
        while not self._stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            if now - last > STALL_S:
                # Of other processes, not of this one's lock.
                self.stalls += now - last - (waited_for_core_s() - waited) > STALL_S
            last, waited = now, waited_for_core_s()


def waited_for_core_s() -> float:
    """How long this thread was ready to run and did not, ever."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Loop:
    """Steps of a small network and some Python, a few milliseconds each."""

    def __init__(self) -> None:
        self._net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        self._batch = torch.randn(64, 256)

    def step(self) -> float:
        started = time.perf_counter()
        for _ in range(4):
            self._net.zero_grad()
            self._net(self._batch).square().mean().backward()
        sum(i * i for i in range(5_000))
        return time.perf_counter() - started

    def run(self, until: Callable[[], bool]) -> list[float]:
        steps: list[float] = []
        while not until():
            steps.append(self.step())
        return steps


def children(pid: int) -> list[int]:
    """All descendants that live."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            own = [int(word) for word in path.read_text().split()]
        except OSError:
            continue
        found += own + [below for child in own for below in children(child)]
    return found


def cpu_s() -> float:
    """CPU seconds of this process and its children, dead ones included."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in children(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def resident_bytes() -> int:
    """Proportional set size of this process and its children."""
    total = 0
    # The children first: what one maps meanwhile is then counted once, not twice.
    for pid in [*children(os.getpid()), os.getpid()]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(text.split("\nPss:")[1].split()[0]) << 10
    return total


class PeakMemory:
    """Watches :func:`resident_bytes` in a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, resident_bytes())


class Yardsticks:
    """One memcpy of the state, and its bytes raw on the disk."""

    def __init__(self, state: State, directory: Path) -> None:
        self._sources = list(state.tensors().values())
        self._size = state.bytes
        self._path = directory / "raw"

    def measure(self) -> tuple[float, float]:
        """Seconds of both. Nothing is held between the calls."""
        memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        targets, offset = [], 0
        for source in self._sources:
            target = torch.frombuffer(
                memory, dtype=source.dtype, count=source.numel(), offset=offset
            )
            targets.append(target.fill_(0))
            offset += source.numel() * source.element_size()
        started = time.perf_counter()
        for target, source in zip(targets, self._sources, strict=True):
            target.copy_(source)
        memcpy_s = time.perf_counter() - started
        return memcpy_s, self._raw(memoryview(memory))

    def _raw(self, data: memoryview) -> float:
        size = data.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0)
        started = time.perf_counter()
        descriptor = os.open(self._path, flags)
        for start in range(0, size, PIECE_BYTES):
            os.pwrite(descriptor, data[start : min(start + PIECE_BYTES, size)], start)
        os.fsync(descriptor)
        os.close(descriptor)
        raw_s = time.perf_counter() - started
        self._path.unlink()
        return raw_s


def save_quietly(method: Method, directory: Path) -> Quiet:
    before, started = cpu_s(), time.perf_counter()
    wait = method.save(directory)
    blocked = time.perf_counter()
    wait()
    complete = time.perf_counter()
    durable = method.durable_s() or complete
    cpu = cpu_s() - before
    return Quiet(blocked - started, durable - started, complete - started, cpu)


def save_beside(method: Method, directory: Path, loop: Loop) -> Beside:
    ends = time.perf_counter() + QUIET_S
    with Sleeper() as sleeper:
        quiet = statistics.fmean(loop.run(lambda: time.perf_counter() > ends))
    quiet_rate = sleeper.stalls / QUIET_S
    done = threading.Event()

    def finish(wait: Callable[[], None]) -> None:
        wait()
        done.set()

    with Sleeper() as sleeper:
        started = time.perf_counter()
        wait = method.save(directory)
        blocked = time.perf_counter() - started
        waiter = threading.Thread(target=finish, args=(wait,))
        waiter.start()
        steps = loop.run(done.is_set)
        waiter.join()
        complete = time.perf_counter() - started
    slowed = max(0.0, sum(steps) - quiet * len(steps))
    worst = max(steps, default=0.0)
    return Beside(blocked, complete, slowed, worst, sleeper.stalls, quiet_rate * complete)


def measure(name: str, state: State, root: Path, rounds: int) -> dict[str, Any]:
    """All rounds of one method, or why there are none."""
    before = resident_bytes()
    yardsticks, loop = Yardsticks(state, root), Loop()
    taken: list[Round] = []
    with PeakMemory() as memory, built(name, state, root) as method:
        if method is None:
            return {"name": name, "absent": "not installed"}
        _fresh(root, lambda directory: save_quietly(method, directory))
        memory.__exit__()
        for _ in range(rounds):
            memcpy_s, raw_s = yardsticks.measure()
            quiet = _fresh(root, lambda directory: save_quietly(method, directory))
            beside = _fresh(root, lambda directory: save_beside(method, directory, loop))
            taken.append(Round(memcpy_s, raw_s, quiet, beside))
    peak = (memory.peak - before) / state.bytes
    return {
        "name": name,
        **figures(taken, state.bytes),
        "peak_extra": peak,
        "rounds": [asdict(r) for r in taken],
    }


def _fresh(root: Path, save: Callable[[Path], Any]) -> Any:
    """Save below a new directory, which is deleted afterwards."""
    directory = Path(tempfile.mkdtemp(dir=root))
    try:
        return save(directory)
    finally:
        shutil.rmtree(directory)


def figures(taken: Sequence[Round], size: int) -> dict[str, float | dict[str, float]]:
    """The figures of the docstring; those of the best rounds under ``best``."""
    every = {
        "blocked": [r.beside.blocked_s / r.memcpy_s for r in taken],
        "lost": [(r.beside.blocked_s + r.beside.slowed_s) / r.memcpy_s for r in taken],
        "cpu_s_per_gb": [r.quiet.cpu_s / size * GB for r in taken],
        "durable": [r.raw_s / writing_s(r.quiet, r.quiet.durable_s) for r in taken],
        "complete": [r.raw_s / writing_s(r.quiet, r.quiet.complete_s) for r in taken],
        "stalls": [float(r.beside.stalls) for r in taken],
        "quiet_stalls": [r.beside.quiet_stalls for r in taken],
        "worst_step_ms": [r.beside.worst_step_s * 1e3 for r in taken],
        "memcpy_s_per_gb": [r.memcpy_s / size * GB for r in taken],
        "raw_gb_per_s": [size / GB / r.raw_s for r in taken],
    }
    blocked = sorted(every["blocked"])
    return {
        **{name: statistics.median(values) for name, values in every.items()},
        "blocked_p95": blocked[min(len(blocked) - 1, int(0.95 * len(blocked)))],
        "best": {
            name: max(values) if name in HIGHER_IS_BETTER else min(values)
            for name, values in every.items()
        },
    }


def writing_s(quiet: Quiet, until_s: float) -> float:
    """From the return of the call, unless all was done by then."""
    behind = until_s - quiet.blocked_s
    return behind if behind > 0.05 * until_s else until_s


def table(results: Sequence[dict[str, Any]]) -> str:
    """Two lines a method, the targets last."""
    columns = ["blocked", "blocked_p95", "lost", "cpu_s_per_gb", "durable", "complete"]
    columns += ["stalls", "quiet_stalls", "worst_step_ms", "peak_extra"]

    def line(name: str, figures: dict[str, Any]) -> str:
        cells = [f"{figures[c]:14.2f}" if c in figures else " " * 14 for c in columns]
        return f"{name:22}" + "".join(cells)

    lines = [f"{'':22}" + "".join(f"{column:>14}" for column in columns)]
    for result in results:
        if "absent" in result:
            lines.append(f"{result['name']:22}{result['absent']:>14}")
        else:
            lines += [line(result["name"], result), line("  best round", result["best"])]
    return "\n".join([*lines, line("target", TARGETS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--directory", type=Path, help="where to write; default: the temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = State(options.bytes)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        for name in options.only:
            results.append(measure(name, state, Path(root), options.rounds))
            sys.stderr.write(f"{name} done\n")
    sys.stdout.write(table(results) + "\n")
    if options.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        report = {"bytes": state.bytes, **machine, "targets": TARGETS, "methods": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
