"""``perdure doctor`` finds file systems that lie; each lie is put in where the kernel answers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckpt_cases import names, perdure, script

from perdure import CheckpointEngine, every
from perdure.cli import doctor
from perdure.core.clock import SystemClock
from perdure.storage import bulk, probe
from perdure.storage.probe import Finding, file_system, probe_directory

CHECKS = ["file system", "fsync", "rename", "link", "locks", "O_DIRECT", "writing"]


def found(directory: Path) -> dict[str, Finding]:
    findings = probe_directory(directory, clock=SystemClock(), write_bytes=1 << 20)
    assert [finding.name for finding in findings] == CHECKS
    return {finding.name: finding for finding in findings}


def test_an_honest_disk_passes_and_nothing_is_left(tmp_path: Path) -> None:
    grades = {name: finding.grade for name, finding in found(tmp_path).items()}
    assert {name for name, grade in grades.items() if grade == "failed"} == set()
    assert grades["link"] == grades["locks"] == grades["rename"] == grades["writing"] == "ok"
    assert list(tmp_path.iterdir()) == []


def _refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def _link_over(source: Any, target: Any) -> None:
    """A file system where everybody wins."""
    Path(target).write_bytes(Path(source).read_bytes())


def _slow_copy(self: Path, target: Path) -> Path:
    """A rename that is none: the name is gone for a while."""
    target.unlink()
    data = self.read_bytes()
    for _ in range(200):
        os.sched_yield()
    target.write_bytes(data)
    return target


@pytest.mark.parametrize(
    ("owner", "name", "lie", "check", "grade", "text"),
    [
        (os, "link", _refusing(errno.EPERM), "link", "failed", "hard links are refused"),
        (os, "link", _link_over, "link", "failed", "not exactly one"),
        (os, "fdatasync", _refusing(errno.EIO), "fsync", "failed", "Input/output error"),
        (os, "fdatasync", lambda _: None, "fsync", "warning", "too fast for a disk"),
        (Path, "rename", _slow_copy, "rename", "failed", "is not atomic"),
        (fcntl, "flock", _refusing(errno.EWOULDBLOCK), "locks", "failed", "killed process stays"),
        (probe, "_HOLDER", "print('refused')", "locks", "failed", "a free lock is refused"),
        (
            probe,
            "_HOLDER",
            "print('held', flush=True); input()",
            "locks",
            "failed",
            "two processes",
        ),
        (bulk, "check_image", lambda *_: [0], "writing", "failed", "reads back wrong"),
    ],
)
def test_lies_are_found(
    owner: Any,
    name: str,
    lie: Any,
    check: str,
    grade: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, lie)
    finding = found(tmp_path)[check]
    assert (finding.grade, text in finding.text) == (grade, True), finding


def test_no_o_direct_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opening(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    findings = found(tmp_path)
    assert findings["O_DIRECT"].grade == "warning"
    assert findings["writing"].grade == "ok"


@pytest.mark.parametrize(
    ("kind", "grade", "text"),
    [("ext4", "ok", "ext4"), ("tmpfs", "warning", "lost"), ("fuse.x", "warning", "answers for")],
)
def test_the_kind_of_file_system_is_judged(
    tmp_path: Path, kind: str, grade: str, text: str
) -> None:
    mounts = tmp_path / "mounts"
    folder = tmp_path / "a b"
    folder.mkdir()
    mounts.write_text(f"x / xfs rw 0 0\ny {tmp_path}/a\\040b {kind} rw 0 0\nz {tmp_path}/a q rw\n")
    finding = file_system(folder, mounts=mounts)
    assert (finding.grade, text in finding.text) == (grade, True), finding


def test_doctor_reports_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WRITE_BYTES", 1 << 20)
    code, out, _ = perdure("doctor", tmp_path / "not" / "yet", "--state-gib", "0.001")
    assert code == 0
    assert out.startswith(f"checked {tmp_path}\n")
    assert "0.00 GiB for staging (two arenas)" in out
    assert {line.split("  ")[0].split()[0] for line in out.splitlines()[1:]} <= {"ok", "warning"}
    assert list(tmp_path.iterdir()) == []


def test_doctor_knows_what_the_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WRITE_BYTES", 1 << 20)
    script(tmp_path / "run", steps=1, weights=1 << 20)
    report = json.loads(perdure("doctor", tmp_path / "run", "--json")[1])
    texts = {finding["name"]: finding["text"] for finding in report["findings"]}
    assert report["ok"] is True
    directory = names(tmp_path / "run")[-1]
    assert f"0.01 GiB for staging (two arenas, as in {directory})" in texts["memory"]
    assert "for 3 checkpoints" in texts["space"]
    assert "torch" in texts["versions"]
    assert "cores" in texts["threads"]
    assert "obstore" in texts["extras"]


def test_doctor_counts_one_arena_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "WRITE_BYTES", 1 << 20)
    out = perdure("doctor", tmp_path, "--state-gib", "0.5", "--arenas", "1")[1]
    assert "0.50 GiB for staging (one arena)" in out
    engine = CheckpointEngine(tmp_path / "run", save=every(steps=1), arenas=1)
    engine.register(model=np.zeros(1 << 26, np.uint8))
    for _ in engine.steps(1):
        pass
    texts = perdure("doctor", tmp_path / "run")[1]
    assert f"0.06 GiB for staging (one arena, as in {names(tmp_path / 'run')[-1]})" in texts


def test_doctor_refuses_what_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WRITE_BYTES", 1 << 20)
    code, out, err = perdure("doctor", tmp_path, "--state-gib", "1e9")
    assert code == 7
    assert "2 of 13 checks failed: space, memory" in err
    assert "failed   space" in out


SMALL_DISK = """
import resource, sys
from pathlib import Path
from perdure.core.clock import SystemClock
from perdure.storage.probe import probe_directory
resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20))
for finding in probe_directory(Path(sys.argv[1]), clock=SystemClock(), write_bytes=24 << 20):
    print(finding.grade, finding.name, finding.text)
"""


def test_what_the_disk_does_not_take_is_a_finding(tmp_path: Path) -> None:
    """The memory of what was being written is given back without a word."""
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("failed")] == [
        "failed writing 25,165,824 bytes: File too large"
    ]
    assert list(tmp_path.iterdir()) == []
