"""Cores within the quotas of control groups, of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.core.cores import usable_cores

ALL = 64


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALL)), raising=False)


def _machine(root: Path, groups: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


UNIFIED = "0::/pods/mine\n"
LEGACY = "5:memory:/pods\n1:cpu,cpuacct:/pods/mine\n0::/\n"
V1 = "cpu,cpuacct"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (UNIFIED, {}, ALL),
        (UNIFIED, {"pods/mine/cpu.max": "max 100000\n"}, ALL),
        (UNIFIED, {"pods/mine/cpu.max": "400000 100000\n"}, 4),
        (UNIFIED, {"pods/mine/cpu.max": "250000 100000\n"}, 2),
        (UNIFIED, {"pods/mine/cpu.max": "20000 100000\n"}, 1),
        (UNIFIED, {"pods/mine/cpu.max": "max 100000\n", "pods/cpu.max": "300000 100000\n"}, 3),
        (UNIFIED, {"pods/mine/cpu.max": "9900000 100000\n", "cpu.max": "800000 100000\n"}, 8),
        (UNIFIED, {"other/cpu.max": "100000 100000\n"}, ALL),
        # As seen from inside a container that does not see where it is mounted.
        (UNIFIED, {"cpu.max": "500000 100000\n"}, 5),
        (UNIFIED, {"cpu.max": "\xff 0\n"}, ALL),
        (UNIFIED, {"cpu.max": "100000 0\n"}, ALL),
        (LEGACY, {f"{V1}/pods/mine/cpu.cfs_quota_us": "-1\n"}, ALL),
        (
            LEGACY,
            {
                f"{V1}/pods/mine/cpu.cfs_quota_us": "-1\n",
                f"{V1}/pods/mine/cpu.cfs_period_us": "100000\n",
            },
            ALL,
        ),
        (
            LEGACY,
            {
                f"{V1}/pods/mine/cpu.cfs_quota_us": "600000\n",
                f"{V1}/pods/mine/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        (
            LEGACY,
            {f"{V1}/cpu.cfs_quota_us": "700000\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
            7,
        ),
        ("nonsense\n::\n", {}, ALL),
    ],
)
def test_cores_stay_within_every_quota(
    tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    assert usable_cores(_machine(tmp_path, groups, **files)) == cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALL


def test_this_machine_has_a_core() -> None:
    assert 1 <= usable_cores() <= ALL
