"""What a log with these promises cannot leave out, beside ``benchmarks/log.py``.

    python benchmarks/log_floor.py [--trajectories N] [--rounds R]

One thread joins the arrays of the same trajectories into blocks of 40, makes a checksum of each
block and one of the whole file, and writes 16 MiB at a time: payload, sync, 100 bytes for each
trajectory in a second file, sync. Nothing is checked, counted or encoded, and nobody could read it
back. The best of the rounds counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).parent))
from log import Figure, Groups, generated, measured

TOGETHER = 5
COMMIT_BYTES = 16 * 2**20
CONTROL_BYTES = 100


def blocks(groups: Groups) -> Iterator[bytes]:
    """The arrays of neighbouring groups in one piece, a column behind the other."""
    for first in range(0, len(groups), TOGETHER):
        some = [one for group in groups[first : first + TOGETHER] for one in group]
        columns = (
            [one.prompt_ids_P for one in some],
            [one.response_ids_T for one in some],
            [one.logprobs_T for one in some],
            [one.loss_mask_T for one in some],
        )
        yield b"".join([array.data for column in columns for array in column])


def append_floor(directory: Path, groups: Groups) -> Figure:
    """Write all trajectories, durably."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    payload = os.open(directory / "payload", flags)
    control = os.open(directory / "control", flags)
    whole = xxhash.xxh3_64()

    def commit(waiting: list[bytes]) -> None:
        for block in waiting:
            xxhash.xxh3_64_intdigest(block)
            whole.update(block)
        os.writev(payload, waiting)
        os.fdatasync(payload)
        rows = len(waiting) * TOGETHER * len(groups[0])
        os.write(control, bytes(CONTROL_BYTES * rows))
        os.fdatasync(control)

    def append() -> None:
        waiting: list[bytes] = []
        for block in blocks(groups):
            waiting.append(block)
            if len(waiting) * len(block) >= COMMIT_BYTES:
                commit(waiting)
                waiting.clear()
        if waiting:
            commit(waiting)

    figure = measured(append, directory)
    os.close(payload)
    os.close(control)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    groups = generated(arguments.trajectories // 8)
    count = len(groups) * 8
    figures: list[Figure] = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
            figures.append(append_floor(Path(name), groups))
        os.sync()
    best = min(figures, key=lambda figure: figure.seconds)
    cpu_us = 1e6 * best.cpu_s / count
    print(f"floor: {best.rate(count):,.0f} trajectories/s, {cpu_us:.1f} us of CPU each")


if __name__ == "__main__":
    main()
