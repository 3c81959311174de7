"""``curve.png``: how a run went, in four small panels over the global step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.runtime.metrics_files import EVALUATIONS_PATH, STEPS_PATH, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, object]]
_INK = "#1b2a41"
_FAINT = "#d9dee7"


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    metric: str
    color: str
    marker: str = ""


_TRAIN_PANELS = (
    _Panel("reward (training prompts)", "reward", "#2a6f97"),
    _Panel("response length (tokens)", "response_length", "#7b5ea7"),
    _Panel("KL to the reference policy", "kl", "#b5651d"),
)
_UPDATE_KL_PANEL = _Panel("KL of one step's updates", "approx_kl", "#b5651d")
"""Shown when there is no reference policy."""
_HELD_OUT_PANEL = _Panel("held-out accuracy", "accuracy", "#2e8b57", marker="o")


def draw_run(run_dir: Path) -> Path:
    """Draw ``curve.png`` of a run from its metrics files; returns its path."""
    path = run_dir / "curve.png"
    steps = read_rows(run_dir / STEPS_PATH)
    draw_curve(steps, read_rows(run_dir / EVALUATIONS_PATH), path)
    return path


def draw_curve(steps: Rows, evaluations: Rows, path: Path) -> None:
    """Draw reward, held-out accuracy, response length and KL against ``global_step``.

    Args:
        steps: Rows of ``metrics/steps.jsonl``.
        evaluations: Rows of ``metrics/evaluations.jsonl``.
        path: The PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.2), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
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
    figure.savefig(path)


def _draw_panel(axes: Axes, panel: _Panel, rows: Rows) -> None:
    points = [
        (int(str(row["global_step"])), value)
        for row in rows
        if (value := _value(row, panel.metric)) is not None
    ]
    axes.set_title(panel.title, loc="left", fontsize=10, color=_INK)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_FAINT)
    if not points:
        axes.text(
            0.5, 0.5, "no rows", ha="center", va="center", transform=axes.transAxes, color=_INK
        )
        return
    x = [step for step, _ in points]
    y = [value for _, value in points]
    axes.plot(
        x,
        y,
        color=panel.color,
        linewidth=1.0,
        alpha=0.35 if len(y) > 20 else 1.0,
        marker=panel.marker,
        markersize=3.5,
    )
    if len(y) > 20:
        axes.plot(x, _smoothed(y), color=panel.color, linewidth=1.8)
    axes.annotate(
        f"{y[-1]:.3g}",
        (x[-1], y[-1]),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=8,
        color=panel.color,
    )


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
