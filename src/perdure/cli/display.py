"""What a running trainer shows: a progress bar on a terminal, plain lines in a file, or JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from perdure.cli.output import silence
from perdure.cli.summary import Summary
from perdure.core.events import format_event

_SHOWN = frozenset(
    {
        "run_started",
        "run_finished",
        "claimed",
        "log_tail_cut",
        "checkpoint_committed",
        "checkpoint_skipped",
        "checkpoint_damaged",
        "checkpoint_failed",
        "restored",
        "redo_started",
        "redone",
        "redo_finished",
        "warm_start",
        "step",
        "evaluated",
        "warning",
    }
)
"""Events that people are told; all of them are in the run's ``events.jsonl``."""

_ALARMING = frozenset({"checkpoint_damaged", "checkpoint_failed", "checkpoint_skipped", "warning"})


class Display(Protocol):
    """An event sink with an end. Events come from several threads."""

    def __call__(self, name: str, fields: dict[str, object]) -> None: ...

    def note(self, text: str) -> None:
        """A line for people."""
        ...

    def summary(self, summary: Summary) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *details: object) -> None: ...


def make_display(*, json: bool) -> Display:
    """The display for standard output as it is."""
    if json:
        return JsonDisplay(sys.stdout)
    if sys.stdout.isatty():
        return TerminalDisplay(Console(highlight=False))
    return PlainDisplay(sys.stdout)


class _LineDisplay:
    """Writes lines to a stream. A reader that went away ends the display, never the training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._reader_gone = False

    def _write(self, line: str) -> None:
        with self._lock:
            if self._reader_gone:
                return
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            except OSError:
                self._reader_gone = True
                if self._stream is sys.stdout:
                    silence(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        del details


class PlainDisplay(_LineDisplay):
    """One canonical line per event of interest."""

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        if name in _SHOWN:
            self._write(format_event(name, fields))

    def note(self, text: str) -> None:
        self._write(text)

    def summary(self, summary: Summary) -> None:
        for line in summary.lines():
            self._write(line)


class JsonDisplay(_LineDisplay):
    """Every event as one JSON object per line."""

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        self._write(json.dumps({"event": name, **fields}, default=str))

    def note(self, text: str) -> None:
        self("note", {"message": text})

    def summary(self, summary: Summary) -> None:
        self("summary", summary.to_json())


class TerminalDisplay:
    """A progress bar with one line per global step above it.

    The bar's lengths are the optional fields ``total_steps`` and ``warm_start_steps`` of
    ``run_started``; without them it shows how far, but not how much is left.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._totals: dict[str, int | None] = {}

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        if name == "run_started":
            for key in ("total_steps", "warm_start_steps"):
                self._totals[key] = _number(fields.get(key))
        if name == "warm_start":
            self._advance("warm start", fields["step"], self._totals.get("warm_start_steps"))
        elif name == "redone":
            self._advance("redo", fields["global_step"], self._totals.get("total_steps"))
        elif name == "step":
            self._advance("training", fields["global_step"], self._totals.get("total_steps"))
            self._console.print(_step_line(fields))
        elif name == "evaluated":
            self._console.print(
                f"[bold green]step {fields['global_step']:>5}  held-out accuracy"
                f" {_text(fields['accuracy'])}[/]"
            )
        elif name in _SHOWN:
            style = "bold red" if name in _ALARMING else "dim"
            self._console.print(format_event(name, fields), style=style, markup=False)

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
        self._progress.update(
            self._task, description=phase, completed=_number(step) or 0, total=total
        )


def _step_line(fields: dict[str, object]) -> str:
    parts = [f"step {fields['global_step']:>5}"]
    for key, value in fields.items():
        if key not in ("global_step", "seconds"):
            parts.append(f"{key.replace('_', ' ')} {_text(value)}")
    parts.append(f"[dim]{_text(fields['seconds'])} s[/]")
    return "  ".join(parts)


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
