"""``curve.png``: how a run went, in four small panels over the global step."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.core.clock import Clock
from perdure.runtime.metrics_files import EVALUATIONS_PATH, STEPS_PATH, read_rows
from perdure.storage import PosixStorage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, object]]
CURVE_FILE = "curve.png"
REDRAW_S = 60.0
"""Shortest time between two drawings of a run that goes on; one takes 0.4 s of CPU."""
_INK = "#1b2a41"
_FAINT = "#d9dee7"
_SMOOTHED_FROM = 20
"""More points than this are too noisy to be read without a mean."""


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    metric: str
    color: str
    marker: str = ""
    log_scale: bool = False


_TRAIN_PANELS = (
    _Panel("reward (training prompts)", "reward", "#2a6f97"),
    _Panel("response length (tokens)", "response_length", "#7b5ea7"),
    _Panel("KL to the reference policy", "kl", "#b5651d", log_scale=True),
)
_UPDATE_KL_PANEL = _Panel("KL of one step's updates", "approx_kl", "#b5651d", log_scale=True)
"""Shown when there is no reference policy."""
_HELD_OUT_PANEL = _Panel("held-out accuracy", "accuracy", "#2e8b57", marker="o")


class CurveFile:
    """Keeps ``curve.png`` of a run that goes on up to date, without spending its time on it."""

    def __init__(self, run_dir: Path, *, clock: Clock) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._drawn_s = clock.monotonic_s()

    def refresh(self) -> bool:
        """Draw unless it was drawn, or the run was started, less than :data:`REDRAW_S` ago.

        Raises:
            StorageError, DamagedError: As :func:`draw_run`.
        """
        if self._clock.monotonic_s() - self._drawn_s < REDRAW_S:
            return False
        draw_run(self._run_dir)
        self._drawn_s = self._clock.monotonic_s()
        return True


def draw_run(run_dir: Path) -> Path:
    """Draw ``curve.png`` of a run from its metrics files; returns its path.

    Whoever looks at the file meanwhile sees the old picture or the new one.

    Raises:
        StorageError: The file cannot be written, or a metrics file cannot be read.
        DamagedError: A line of a metrics file is no row.
    """
    picture = draw_curve(
        read_rows(run_dir / STEPS_PATH), read_rows(run_dir / EVALUATIONS_PATH), title=str(run_dir)
    )
    PosixStorage(run_dir).write_atomic(CURVE_FILE, picture)
    return run_dir / CURVE_FILE


def draw_curve(steps: Rows, evaluations: Rows, *, title: str) -> bytes:
    """Draw reward, held-out accuracy, response length and KL against ``global_step``.

    Args:
        steps: Rows of ``metrics/steps.jsonl``.
        evaluations: Rows of ``metrics/evaluations.jsonl``.
        title: What stands above the panels.

    Returns:
        A PNG image.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    # A path may hold what matplotlib takes for mathematics.
    figure.suptitle(title, fontsize=10, color=_INK, x=0.01, ha="left", parse_math=False)
    axes = figure.subplots(2, 2, sharex=True)
    reward, length, kl = _TRAIN_PANELS
    if all(_value(row, kl.metric) is None for row in steps):
        kl = _UPDATE_KL_PANEL
    for panel, rows, place in (
        (reward, steps, axes[0, 0]),
        (_HELD_OUT_PANEL, evaluations, axes[0, 1]),
        (length, steps, axes[1, 0]),
        (kl, steps, axes[1, 1]),
    ):
        _draw_panel(place, panel, rows)
    for place in axes[1]:
        place.set_xlabel("global_step", color=_INK, fontsize=9)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _draw_panel(axes: Axes, panel: _Panel, rows: Rows) -> None:
    values = [(int(str(row["global_step"])), _value(row, panel.metric)) for row in rows]
    points = [(step, value) for step, value in values if value is not None]
    _dress(axes, panel)
    if not points:
        axes.text(
            0.5, 0.5, "no rows", ha="center", va="center", transform=axes.transAxes, color=_INK
        )
        return
    x = [step for step, _ in points]
    y = [value for _, value in points]
    bold = y
    if len(y) > _SMOOTHED_FROM:
        bold = _smoothed(y)
        axes.plot(x, y, color=panel.color, linewidth=1.0, alpha=0.35, label="each step")
        axes.plot(x, bold, color=panel.color, linewidth=1.8, label="moving average")
        legend = axes.legend(fontsize=7, frameon=False, labelcolor=_INK)
        legend.set_in_layout(False)
    else:
        axes.plot(x, y, color=panel.color, linewidth=1.0, marker=panel.marker, markersize=3.5)
    if panel.log_scale and min(y) > 0:
        axes.set_yscale("log")
    axes.annotate(
        f"{bold[-1]:.3g}",
        (x[-1], bold[-1]),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=8,
        color=panel.color,
    )


def _dress(axes: Axes, panel: _Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10, color=_INK)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8, length=0, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)


def _value(row: Mapping[str, object], metric: str) -> float | None:
    metrics = row["metrics"]
    assert isinstance(metrics, Mapping)
    value = metrics.get(metric)
    return None if value is None else float(value)


def _smoothed(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average without the bias of its start."""
    smooth: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smooth.append(total / norm)
    return smooth
