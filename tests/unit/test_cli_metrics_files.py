"""The projection of the log into metrics files, TensorBoard events and the picture."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest

from perdure.core.clock import ManualClock
from perdure.core.errors import StorageError
from perdure.core.ids import GlobalStep, OptimizerStep
from perdure.core.records import Evaluated, StepDone
from perdure.runtime.curves import CURVE_FILE, REDRAW_S, CurveFile, draw_curve, draw_run
from perdure.runtime.metrics_files import (
    EVALUATIONS_PATH,
    EVENTS_PATH,
    STEPS_PATH,
    TENSORBOARD_DIR,
    EventsFile,
    LineFile,
    MetricsFiles,
    read_rows,
)
from perdure.runtime.tensorboard_file import TensorBoardFile
from perdure.storage import PosixStorage


def done(step: int, *, digest: str = "d", reward: float = 0.5) -> StepDone:
    return StepDone(
        global_step=GlobalStep(step),
        digest=f"{digest}{step}",
        policy_digest="p",
        optimizer_step=OptimizerStep(step),
        metrics={"reward": reward, "response_length": 7.0, "kl": 0.01},
        timings_s={"generate": 1.5},
    )


def evaluated(step: int, accuracy: float) -> Evaluated:
    return Evaluated(GlobalStep(step), f"d{step}", {"accuracy": accuracy}, {"validation": 0.5})


def files(run_dir: Path, *, tensorboard: bool = False) -> MetricsFiles:
    return MetricsFiles(
        run_dir, storage=PosixStorage(run_dir), clock=ManualClock(), tensorboard=tensorboard
    )


def steps_of(run_dir: Path) -> list[object]:
    return [row["global_step"] for row in read_rows(run_dir / STEPS_PATH)]


def test_rows_are_keyed_by_step_and_digest(tmp_path: Path) -> None:
    with files(tmp_path) as metrics:
        metrics.rebuild(steps=[], evaluations=[])
        metrics.evaluation(evaluated(0, 0.25))
        metrics.step(done(1))
    assert read_rows(tmp_path / STEPS_PATH) == [
        {
            "global_step": 1,
            "digest": "d1",
            "metrics": {"reward": 0.5, "response_length": 7.0, "kl": 0.01},
            "timings_s": {"generate": 1.5},
        }
    ]
    assert read_rows(tmp_path / EVALUATIONS_PATH) == [
        {
            "global_step": 0,
            "digest": "d0",
            "metrics": {"accuracy": 0.25},
            "timings_s": {"validation": 0.5},
        }
    ]


def test_a_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    with files(tmp_path) as metrics:
        metrics.rebuild(steps=[], evaluations=[])
        metrics.step(done(1))
        assert steps_of(tmp_path) == [1]


def test_rebuilding_neither_overlaps_nor_loses(tmp_path: Path) -> None:
    with files(tmp_path) as metrics:
        metrics.rebuild(steps=[], evaluations=[])
        for step in (1, 2, 3, 4):
            metrics.step(done(step, digest="abandoned"))
    with (tmp_path / STEPS_PATH).open("a") as torn:
        torn.write('{"global_step":5,"di')
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    with files(tmp_path) as metrics:
        metrics.rebuild(steps=[done(1), done(2), done(3)], evaluations=[evaluated(0, 0.5)])
        metrics.step(done(4))
    lines = (tmp_path / STEPS_PATH).read_text().splitlines()
    assert [json.loads(line)["digest"] for line in lines] == ["d1", "d2", "d3", "d4"]


def test_a_fenced_process_writes_to_the_file_of_the_past(tmp_path: Path) -> None:
    with files(tmp_path) as zombie, files(tmp_path) as metrics:
        zombie.rebuild(steps=[], evaluations=[])
        metrics.rebuild(steps=[done(1)], evaluations=[])
        zombie.step(done(2, digest="zombie"))
        metrics.step(done(2))
    assert [row["digest"] for row in read_rows(tmp_path / STEPS_PATH)] == ["d1", "d2"]


def test_the_last_row_of_a_step_counts(tmp_path: Path) -> None:
    with files(tmp_path) as metrics:
        metrics.rebuild(steps=[], evaluations=[])
        metrics.step(done(2))
        metrics.step(done(1))
        metrics.step(done(2, digest="redone"))
    assert [row["digest"] for row in read_rows(tmp_path / STEPS_PATH)] == ["d1", "redone2"]


def test_no_file_means_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / STEPS_PATH) == []


def test_a_refusing_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / EVENTS_PATH).mkdir()
    with pytest.raises(StorageError, match=r"events.jsonl: cannot be written"):
        EventsFile(tmp_path, clock=ManualClock())


def test_events_are_appended_over_incarnations(tmp_path: Path) -> None:
    for incarnation in (1, 2):
        events = EventsFile(tmp_path, clock=ManualClock(5.0))
        events("claimed", {"incarnation": incarnation, "parent": 0, "took_over": False})
        events.close()
        with (tmp_path / EVENTS_PATH).open("a") as torn:
            torn.write("{torn")
    lines = (tmp_path / EVENTS_PATH).read_text().splitlines()
    assert json.loads(lines[0]) == {
        "wall_s": 5.0,
        "event": "claimed",
        "incarnation": 1,
        "parent": 0,
        "took_over": False,
    }
    assert json.loads(lines[2])["incarnation"] == 2


def test_a_full_disk_stops_no_event_and_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventsFile(tmp_path, clock=ManualClock(5.0))
    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", _refuse)
        events("warning", {"message": "lost"})
        events("warning", {"message": "lost too"})
    events("warning", {"message": "kept"})
    events.close()
    missing, kept = map(json.loads, (tmp_path / EVENTS_PATH).read_text().splitlines())
    assert missing == {"wall_s": 5.0, "event": "events_missing", "count": 2}
    assert kept["message"] == "kept"


def _refuse(*_: object) -> None:
    raise StorageError("cannot be written")


def test_a_full_disk_refuses_a_line(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "x.jsonl")
    file.close()
    with Path("/dev/full").open("ab", buffering=0) as full:
        file._file = full
        with pytest.raises(StorageError, match="No space left"):
            file.append({"a": 1})


def test_a_half_written_line_is_closed_before_the_next(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "x.jsonl")
    real = file._file

    class Halving:
        def write(self, data: bytes) -> int:
            return real.write(data[: len(data) // 2])

    file._file = Halving()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StorageError, match="No space left"):
        file.append({"a": "torn"})
    file._file = real
    file.append({"a": "whole"})
    file.close()
    assert (tmp_path / "x.jsonl").read_text().splitlines()[-1] == '{"a":"whole"}'


def _board(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / TENSORBOARD_DIR))
    board.Reload()
    return {
        tag: [(point.step, round(point.value, 4)) for point in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }


def test_tensorboard_sees_one_curve_across_a_resume(tmp_path: Path) -> None:
    with files(tmp_path, tensorboard=True) as metrics:
        metrics.rebuild(steps=[], evaluations=[])
        metrics.step(done(1, reward=0.1))
        metrics.step(done(2, reward=0.2))
        assert _board(tmp_path)["train/reward"] == [(1, 0.1), (2, 0.2)]
    with files(tmp_path, tensorboard=True) as metrics:
        metrics.rebuild(steps=[done(1, reward=0.1)], evaluations=[evaluated(0, 0.25)])
        metrics.step(done(2, reward=0.3))
        metrics.step(done(3, reward=float("nan")))
    board = _board(tmp_path)
    assert board["train/reward"] == [(1, 0.1), (2, 0.3)]
    assert board["held_out/accuracy"] == [(0, 0.25)]
    assert board["train_seconds/generate"] == [(1, 1.5), (2, 1.5), (3, 1.5)]


def test_a_board_that_is_refused_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caller's thread: a failure in a thread of TensorBoard's would reach nobody."""

    def full(_: TensorBoardFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    threads = threading.active_count()
    with files(tmp_path, tensorboard=True) as metrics:
        metrics.rebuild(steps=[], evaluations=[])
        assert threading.active_count() == threads
        monkeypatch.setattr(TensorBoardFile, "flush", full)
        with pytest.raises(StorageError, match="tensorboard: cannot be written"):
            metrics.step(done(1))


def test_the_picture(tmp_path: Path) -> None:
    with files(tmp_path) as metrics:
        metrics.rebuild(
            steps=[done(step, reward=step / 60) for step in range(1, 61)],
            evaluations=[evaluated(0, 0.4), evaluated(30, 0.7), evaluated(60, 0.9)],
        )
    path = draw_run(tmp_path)
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_a_run_that_goes_on_is_drawn_now_and_then(tmp_path: Path) -> None:
    clock = ManualClock()
    with files(tmp_path) as metrics:
        metrics.rebuild(steps=[done(1)], evaluations=[])
    curve = CurveFile(tmp_path, clock=clock)
    assert not curve.refresh()
    clock.advance(REDRAW_S)
    assert curve.refresh()
    before = (tmp_path / CURVE_FILE).stat().st_ino
    assert not curve.refresh()
    clock.advance(REDRAW_S)
    assert curve.refresh()
    assert (tmp_path / CURVE_FILE).stat().st_ino != before, "replaced, never written into"
    assert sorted(path.name for path in tmp_path.iterdir()) == [CURVE_FILE, "metrics"]


def test_what_matplotlib_takes_for_mathematics_is_a_title() -> None:
    assert draw_curve([], [], title="runs/$x^$").startswith(b"\x89PNG")


def test_the_picture_of_a_run_without_rows() -> None:
    assert len(draw_curve([], [], title="x")) > 1000
