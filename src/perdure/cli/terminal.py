"""A progress bar with one line per unit of work above it."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from perdure.cli.sentences import sentence
from perdure.cli.summary import Summary

_ALARMING = frozenset({"checkpoint_damaged", "checkpoint_failed", "checkpoint_skipped", "warning"})


class TerminalDisplay:
    """Shows one phase at a time: the warm start, a redo, or the training.

    Time and what is left are those of the phase. The bar's lengths are the optional fields
    ``total_steps`` and ``warm_start_steps`` of ``run_started`` and the span of ``redo_started``;
    without them it shows how far, but not how much is left.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._phase = "starting"
        self._totals: dict[str, int | None] = {}
        self._redo_from = 0

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        if name == "run_started":
            for key in ("total_steps", "warm_start_steps"):
                self._totals[key] = _number(fields.get(key))
        elif name == "warm_start_step":
            self._advance("warm start", fields["step"], self._totals.get("warm_start_steps"))
        elif name == "redo_started":
            first, last = _number(fields["from_step"]) or 0, _number(fields["to_step"]) or 0
            self._redo_from = first
            self._advance("redo", 0, last - first + 1)
        elif name == "redone":
            done = (_number(fields["global_step"]) or 0) - self._redo_from + 1
            self._progress.update(self._task, completed=done)
        elif name == "step":
            self._advance("training", fields["global_step"], self._totals.get("total_steps"))
        self._print(name, fields)

    def _print(self, name: str, fields: dict[str, object]) -> None:
        if name == "step":
            self._console.print(_step_line(fields))
        elif name == "evaluated":
            self._console.print(
                f"[bold green]step {fields['global_step']:>5}  held-out accuracy"
                f" {_text(fields['accuracy'])}[/]"
            )
        elif name == "redone":
            self._console.print(sentence(name, fields))
        else:
            line = sentence(name, fields)
            if line is not None:
                style = "bold red" if name in _ALARMING else "dim"
                self._console.print(line, style=style, markup=False)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def summary(self, summary: Summary) -> None:
        for line in summary.lines():
            self._console.print(line, style="bold", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        del details
        self._progress.stop()

    def _advance(self, phase: str, step: object, total: int | None) -> None:
        done = _number(step) or 0
        if phase != self._phase:
            # What lay behind when the phase began says nothing about its speed.
            self._phase = phase
            before = max(0, done - 1)
            self._progress.reset(self._task, total=total, completed=before, description=phase)
        self._progress.update(self._task, completed=done, total=total)


def _step_line(fields: dict[str, object]) -> str:
    parts = [f"step {fields['global_step']:>5}"]
    for key, value in fields.items():
        if key not in ("global_step", "seconds"):
            parts.append(f"{key.replace('_', ' ')} {escape(_text(value))}")
    parts.append(f"[dim]{_text(fields['seconds'])} s[/]")
    return "  ".join(parts)


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
