"""kill -9 of the process that trains or of the one that writes, at random moments of its saves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import pytest

SCRIPT = Path(__file__).with_name("saving_process.py")
DEADLINE_S = 60.0


class Saving:
    """A running ``saving_process.py`` and what it has said so far."""

    def __init__(self, run: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(run)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, word: str, *, after: int = 0) -> int:
        """Wait for a line that starts so, among those behind the first ``after``; lines so far."""
        with self._said:
            assert self._said.wait_for(
                lambda: (
                    any(line.startswith(word) for line in self._lines[after:])
                    or self._process.poll() is not None
                ),
                DEADLINE_S,
            )
            assert any(line.startswith(word) for line in self._lines[after:]), self.errors()
            return len(self._lines)

    def writer(self) -> int:
        """The process that writes. One that was killed may not have a successor yet."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            children = Path(f"/proc/{self._process.pid}/task").glob("*/children")
            pids = {int(word) for path in children for word in _text(path).split()}
            alive = [pid for pid in pids if _is_alive(pid)]
            if len(alive) == 1:
                return alive[0]
            time.sleep(0.001)
        raise AssertionError("nobody has replaced the process that was killed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        del details
        if self._process.poll() is None:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> None:
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()

    def last(self, word: str) -> int:
        """The number in the last line that starts so; -1 if there is none."""
        numbers = [int(line.split()[-1]) for line in self._lines if line.startswith(word)]
        return numbers[-1] if numbers else -1

    def errors(self) -> str:
        self._process.kill()
        assert self._process.stderr is not None
        return self._process.stderr.read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._said:
                self._lines.append(line.strip())
                self._said.notify_all()


def _text(path: Path) -> str:
    """Of a file below ``/proc``; empty if whom it tells of is gone."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_alive(pid: int) -> bool:
    state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def wait_for_temporary(checkpoints: Path) -> None:
    """Until a save is on its way."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        # Directories come and go meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if list(checkpoints.rglob(".tmp-*")):
                return
        assert time.monotonic() < deadline_s, "no save began"


COUNTS = [6, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("kills", COUNTS)
def test_the_process_that_trains_is_killed(tmp_path: Path, kills: int) -> None:
    chance = random.Random(f"kill the parent {kills}")
    committed, torn_off = -1, 0
    for number in range(kills):
        with Saving(tmp_path / "run") as saving:
            saving.wait_for("started after")
            # A commit that was durable may not have been printed any more.
            assert saving.last("started after") >= max(committed, 0)
            saving.wait_for("committed")
            if number % 2:
                time.sleep(chance.uniform(0.0, 0.25))
            else:
                wait_for_temporary(tmp_path / "run/checkpoints")
        committed = saving.last("committed")
        torn_off += bool(list((tmp_path / "run/checkpoints").rglob(".tmp-*")))
    assert torn_off, "no save was cut short: the drill shows nothing"


@pytest.mark.parametrize("kills", COUNTS)
def test_the_process_that_writes_is_killed(tmp_path: Path, kills: int) -> None:
    chance = random.Random(f"kill the child {kills}")
    replaced = 0
    with Saving(tmp_path / "run") as saving:
        for _ in range(kills):
            before = saving.wait_for("committed", after=replaced)
            time.sleep(chance.uniform(0.0, 0.05))
            os.kill(saving.writer(), signal.SIGKILL)
            replaced = saving.wait_for("lost", after=before)
        assert replaced, "no writer was killed: the drill shows nothing"
        saving.wait_for("committed", after=replaced)
    with Saving(tmp_path / "run") as again:
        again.wait_for("started after")
        assert again.last("started after") >= saving.last("committed")
