"""What is said at the end of a run, taken from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from perdure.runtime.curves import draw_run
from perdure.runtime.metrics_files import EVALUATIONS_PATH, STEPS_PATH, read_rows


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a run; accuracies are None without validation.

    Attributes:
        first_accuracy: Before the first global step, which is behind the warm start if there is
            one (``warm_start``).
    """

    run: str
    global_steps: int
    first_accuracy: float | None
    last_accuracy: float | None
    curve: str
    warm_start: bool = False

    def lines(self) -> list[str]:
        lines = [f"run {self.run}: {self.global_steps} global steps"]
        if self.last_accuracy is not None:
            before = "after the warm start" if self.warm_start else "before training"
            lines.append(
                f"held-out accuracy {self.last_accuracy:.2f} ({before} {self.first_accuracy:.2f})"
            )
        lines.append(f"curve {self.curve}")
        return lines

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def summarize(run_dir: Path, *, warm_start: bool = False) -> Summary:
    """Draw ``curve.png`` and sum up the run from its metrics files.

    Args:
        run_dir: The run.
        warm_start: Whether it began with one.
    """
    steps = read_rows(run_dir / STEPS_PATH)
    evaluations = read_rows(run_dir / EVALUATIONS_PATH)
    return Summary(
        run=str(run_dir),
        global_steps=int(str(steps[-1]["global_step"])) if steps else 0,
        first_accuracy=_accuracy(evaluations[0]) if evaluations else None,
        last_accuracy=_accuracy(evaluations[-1]) if evaluations else None,
        curve=str(draw_run(run_dir)),
        warm_start=warm_start,
    )


def _accuracy(row: Mapping[str, object]) -> float:
    metrics = row["metrics"]
    assert isinstance(metrics, Mapping)
    return float(metrics["accuracy"])
