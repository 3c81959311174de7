"""What a running trainer shows: a progress bar on a terminal, plain lines in a file, or JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Protocol, Self, TextIO

from rich.console import Console

from perdure.cli.output import silence, silence_unread
from perdure.cli.summary import Summary
from perdure.cli.terminal import TerminalDisplay
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
        "rewound",
        "groups_abandoned",
        "redo_started",
        "redone",
        "redo_finished",
        "warm_start",
        "warm_start_again",
        "step",
        "waiting",
        "engine_lost",
        "engine_replaced",
        "engine_not_replaced",
        "engine_quarantined",
        "evaluated",
        "warning",
    }
)
"""Events that people are told; all of them are in the run's ``events.jsonl``."""


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
                    # Behind `2>&1 | head` others would fail at their next line to standard error.
                    silence_unread()

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
