"""Metrics and events as files for people and tools: a projection of the experience log.

``metrics/*.jsonl`` and ``tensorboard/`` may lose their last lines in a crash, so an incarnation
starts by writing them again from the kept lineage. Their rows therefore neither overlap nor are
lost, and a file that an older incarnation still holds open is no longer the one under that name.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from perdure.core.clock import Clock
from perdure.core.errors import DamagedError, StorageError
from perdure.core.records import Evaluated, StepDone
from perdure.core.storage_api import Storage
from perdure.runtime.tensorboard_file import TensorBoardFile

METRICS_DIR = "metrics"
STEPS_PATH = f"{METRICS_DIR}/steps.jsonl"
EVALUATIONS_PATH = f"{METRICS_DIR}/evaluations.jsonl"
EVENTS_PATH = "events.jsonl"
TENSORBOARD_DIR = "tensorboard"

_EVENTS_READ_BYTES = 2**20
"""The end of the events that is looked through for the newest of a name."""

Row = dict[str, Any]


class MetricsFiles:
    """Rows ``{global_step, digest, metrics, timings_s}`` of steps and evaluations.

    Use :meth:`rebuild` first, then :meth:`step` and :meth:`evaluation` as records are acknowledged.
    One owner; not thread-safe.
    """

    def __init__(
        self, run_dir: Path, *, storage: Storage, clock: Clock, tensorboard: bool = True
    ) -> None:
        self._run_dir = run_dir
        self._storage = storage
        self._clock = clock
        self._board: TensorBoardFile | None = None
        self._with_board = tensorboard
        self._steps: LineFile | None = None
        self._evaluations: LineFile | None = None

    def rebuild(self, *, steps: Iterable[StepDone], evaluations: Iterable[Evaluated]) -> None:
        """Write all files again from the kept lineage, in order.

        Raises:
            StorageError: The run directory refuses.
        """
        self.close()
        self._storage.make_dirs(METRICS_DIR)
        step_rows = [_row(record) for record in steps]
        evaluation_rows = [_row(record) for record in evaluations]
        for path, rows in ((STEPS_PATH, step_rows), (EVALUATIONS_PATH, evaluation_rows)):
            self._storage.write_atomic(path, "".join(_line(row) for row in rows).encode())
        self._steps = LineFile(self._run_dir / STEPS_PATH)
        self._evaluations = LineFile(self._run_dir / EVALUATIONS_PATH)
        if self._with_board:
            self._storage.remove(TENSORBOARD_DIR)
            self._storage.make_dirs(TENSORBOARD_DIR)
            path = self._run_dir / TENSORBOARD_DIR
            with _refusing(path):
                self._board = TensorBoardFile(path, clock=self._clock)
                for row in step_rows:
                    self._board.add(_tagged("train", row))
                for row in evaluation_rows:
                    self._board.add(_tagged("held_out", row))
                self._board.flush()

    def step(self, record: StepDone) -> None:
        """Append the row of an acknowledged step."""
        assert self._steps is not None, "rebuild comes first"
        self._append(self._steps, "train", _row(record))

    def evaluation(self, record: Evaluated) -> None:
        """Append the row of an acknowledged evaluation."""
        assert self._evaluations is not None, "rebuild comes first"
        self._append(self._evaluations, "held_out", _row(record))

    def close(self) -> None:
        for file in (self._steps, self._evaluations, self._board):
            if file is not None:
                file.close()
        self._steps = self._evaluations = self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, file: LineFile, prefix: str, row: Row) -> None:
        file.append(row)
        if self._board is not None:
            self._board.add(_tagged(prefix, row))
            with _refusing(self._run_dir / TENSORBOARD_DIR):
                self._board.flush()


class EventsFile:
    """``events.jsonl``: every event of every incarnation, appended. Is an ``EventSink``.

    Events tell of the work and are not the work: a disk that refuses them stops nothing here, and
    the next line that it takes is preceded by how many are missing.
    """

    def __init__(self, run_dir: Path, *, clock: Clock) -> None:
        self._file = LineFile(run_dir / EVENTS_PATH)
        self._clock = clock
        self._lock = threading.Lock()
        self._missing = 0

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        """Append one event; thread-safe."""
        stamp = {"wall_s": self._clock.wall_s()}
        with self._lock:
            try:
                if self._missing:
                    self._file.append({**stamp, "event": "events_missing", "count": self._missing})
                    self._missing = 0
                self._file.append({**stamp, "event": name, **fields})
            except StorageError:
                self._missing += 1

    def close(self) -> None:
        self._file.close()


def newest_events(run_dir: Path, names: Collection[str]) -> dict[str, Row]:
    """The newest event of each of these names, as far as the end of ``events.jsonl`` has one."""
    try:
        with (run_dir / EVENTS_PATH).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _EVENTS_READ_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    found: dict[str, Row] = {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
            if row["event"] in names and float(row["wall_s"]) >= 0:
                found.setdefault(row["event"], row)
        except (ValueError, KeyError, TypeError):
            continue
        if len(found) == len(names):
            break
    return found


class LineFile:
    """A file of JSON lines that only grows. A torn last line is closed before the first append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._torn = _is_torn(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _refused(self._path, error) from error

    def append(self, row: Mapping[str, object]) -> None:
        """Hand one line to the operating system, whole.

        Raises:
            StorageError: The disk refuses; part of the line may be in the file.
        """
        line = ("\n" if self._torn else "").encode() + _line(row).encode()
        try:
            written = self._file.write(line)
        except OSError as error:
            raise _refused(self._path, error) from error
        self._torn = written != len(line)
        if self._torn:
            raise _refused(self._path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def close(self) -> None:
        self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether the file ends within a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@contextmanager
def _refusing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot be written ({error.strerror})",
        where=str(path),
        way_out="free space or make it writable, then resume the run",
    )


def read_rows(path: Path) -> list[Row]:
    """Rows of a metrics file in order of ``global_step``; the last row of a step counts.

    A torn last line is left out: the next incarnation writes it again.

    Raises:
        DamagedError: A line is no row.
        StorageError: It cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            f"cannot be read ({error.strerror})",
            where=str(path),
            way_out="make it readable or move it away: it is written again from the log",
        ) from error
    rows: dict[int, Row] = {}
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            if type(row["global_step"]) is not int:
                raise ValueError("global_step is no whole number")
            rows[row["global_step"]] = {"digest": row["digest"], **row}
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(
                f"is no row ({error})",
                where=f"{path}:{number}",
                rule="every line is a JSON object with global_step and digest",
                way_out="resume the run: its curves are written again from the log",
            ) from error
    return [rows[step] for step in sorted(rows)]


def _row(record: StepDone | Evaluated) -> Row:
    return {
        "global_step": int(record.global_step),
        "digest": record.digest,
        "metrics": dict(sorted(record.metrics.items())),
        "timings_s": dict(sorted(record.timings_s.items())),
    }


def _line(row: Mapping[str, object]) -> str:
    return json.dumps(row, separators=(",", ":"), default=str) + "\n"


def _tagged(prefix: str, row: Row) -> tuple[int, dict[str, float]]:
    """The global step of a row and its finite values under TensorBoard tags."""
    values: dict[str, float] = {}
    for group, tag in (("metrics", prefix), ("timings_s", f"{prefix}_seconds")):
        mapping = row[group]
        assert isinstance(mapping, dict)
        values |= {f"{tag}/{k}": float(v) for k, v in mapping.items() if math.isfinite(v)}
    global_step = row["global_step"]
    assert isinstance(global_step, int)
    return global_step, values
