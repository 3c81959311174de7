"""How many cores a process may keep busy."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that the affinity of this process and the quotas of its control groups allow.

    A container that may use two cores of a machine sees all of them, and is stopped for the rest of
    a period (0.1 s as a rule) once it has used its time up. What cannot be read limits nothing.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = min(_quotas(root), default=math.inf)
    return max(1, int(min(cores, quota)))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each control group of this process, or around one of it, may use."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for group in _and_around(mounts, path):
                yield from _ratio(*_words(group / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for group in _and_around(mounts / controllers, path):
                quota, period = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
                yield from _ratio(*_words(quota), *_words(period))


def _and_around(mount: Path, path: str) -> Iterator[Path]:
    """A control group and all that it is in, as far as they are mounted."""
    group = PurePosixPath("/") / path
    for one in (group, *group.parents):
        yield mount / one.relative_to("/")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except (OSError, ValueError):
        return []


def _ratio(*words: str) -> Iterator[float]:
    """The quota of a period, if two numbers say so. ``max`` and -1: there is none."""
    with contextlib.suppress(ValueError):
        quota, period = map(int, words)
        if quota > 0 and period > 0:
            yield quota / period
