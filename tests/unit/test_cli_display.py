"""What people and programs see of a running trainer."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from perdure.cli.display import JsonDisplay, PlainDisplay, TerminalDisplay, make_display
from perdure.cli.summary import Summary
from perdure.core.events import FIELDS

EVENTS: list[tuple[str, dict[str, Any]]] = [
    (
        "run_started",
        {"run": "r", "incarnation": 1, "task": "x", "total_steps": 9, "warm_start_steps": 4},
    ),
    ("waiting", {"what": "3 CPUs", "seconds": 0.0}),
    ("waiting", {"what": "3 CPUs", "seconds": 30.04}),
    ("warm_start_again", {"logged_step": 2}),
    ("warm_start", {"step": 2, "loss": 1.25, "seconds": 0.5}),
    ("log_committed", {"records": 3, "bytes": 9, "fsync_ms": 0.1}),
    ("redone", {"global_step": 1, "digest": "d", "equal": True}),
    ("step", {"global_step": 2, "reward": 0.5, "seconds": 1.0, "response_length": 7.5}),
    ("evaluated", {"global_step": 2, "accuracy": 0.75, "seconds": 0.2}),
    ("warning", {"message": "[slow] disk"}),
]
SUMMARY = Summary("runs/x", 2, 0.25, 0.75, "runs/x/curve.png")


class GoneAway(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def show(display: Any) -> None:
    with display:
        for name, fields in EVENTS:
            display(name, fields)
        display.note("a note")
        display.summary(SUMMARY)


def test_plain_lines() -> None:
    stream = io.StringIO()
    show(PlainDisplay(stream))
    assert stream.getvalue().splitlines() == [
        "run_started run=r incarnation=1 task=x total_steps=9 warm_start_steps=4",
        "waiting what=3 CPUs seconds=0",
        "waiting what=3 CPUs seconds=30.04",
        "warm_start_again logged_step=2",
        "warm_start step=2 loss=1.25 seconds=0.5",
        "redone global_step=1 digest=d equal=True",
        "step global_step=2 reward=0.5 seconds=1 response_length=7.5",
        "evaluated global_step=2 accuracy=0.75 seconds=0.2",
        "warning message=[slow] disk",
        "a note",
        "run runs/x: 2 global steps",
        "held-out accuracy 0.75 (before training 0.25)",
        "curve runs/x/curve.png",
    ]


def test_json_lines_carry_every_event() -> None:
    stream = io.StringIO()
    show(JsonDisplay(stream))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[: len(EVENTS)] == [{"event": name, **fields} for name, fields in EVENTS]
    assert lines[-2] == {"event": "note", "message": "a note"}
    assert lines[-1]["last_accuracy"] == 0.75


def test_a_terminal_has_a_line_per_global_step() -> None:
    stream = io.StringIO()
    show(TerminalDisplay(Console(file=stream, force_terminal=True, color_system=None, width=120)))
    text = stream.getvalue()
    assert "step     2  reward 0.500  response length 7.500  1.000 s" in text
    assert "step     2  held-out accuracy 0.750" in text
    assert "warning: [slow] disk" in text
    assert "run r: x, 9 global steps after a warm start of 4" in text
    assert "step     1  redone d  equal" in text
    assert "waits for 3 CPUs\n" in text
    assert "waits for 3 CPUs, for 30 s now\n" in text
    assert "no checkpoint was saved before: the warm start begins again; its log reaches" in text
    assert "=" not in text
    assert "held-out accuracy 0.75 (before training 0.25)" in text
    assert "log_committed" not in text


def test_the_bar_knows_its_length() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=120)
    display = TerminalDisplay(console)
    with display:
        display(*EVENTS[0])
        display("warm_start_step", {"step": 2})
    assert "warm start" in stream.getvalue()
    assert "2/4" in stream.getvalue()
    with display:
        display("redo_started", {"from_step": 21, "to_step": 35})
        display("redone", {"global_step": 23, "digest": "d", "equal": True})
    assert "3/15" in stream.getvalue()
    with display:
        display("step", {"global_step": 2, "reward": 0.5, "seconds": 1.0})
    assert "2/9" in stream.getvalue()


@pytest.mark.parametrize("kind", [PlainDisplay, JsonDisplay])
def test_a_reader_that_leaves_does_not_stop_the_training(kind: type[Any]) -> None:
    show(kind(GoneAway()))


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_event_can_be_shown(name: str) -> None:
    fields: dict[str, object] = dict.fromkeys(FIELDS[name], 1)
    console = Console(file=io.StringIO(), force_terminal=True)
    for display in (PlainDisplay(io.StringIO()), JsonDisplay(io.StringIO())):
        display(name, fields)
    TerminalDisplay(console)(name, fields)


def test_the_display_suits_standard_output() -> None:
    assert isinstance(make_display(json=True), JsonDisplay)
    assert isinstance(make_display(json=False), PlainDisplay)


def test_a_different_redo_is_shown_as_one() -> None:
    stream = io.StringIO()
    display = TerminalDisplay(Console(file=stream, force_terminal=True, color_system=None))
    display("redone", {"global_step": 3, "digest": "0123456789abcdef", "equal": False})
    assert "redone 0123456789  DIFFERS" in stream.getvalue()


def test_a_summary_says_what_the_first_accuracy_is_of() -> None:
    summary = Summary("runs/x", 2, 0.25, 0.75, "runs/x/curve.png", warm_start=True)
    assert summary.lines()[1] == "held-out accuracy 0.75 (after the warm start 0.25)"


def test_a_summary_without_validation() -> None:
    summary = Summary("runs/x", 0, None, None, "runs/x/curve.png")
    assert summary.lines() == ["run runs/x: 0 global steps", "curve runs/x/curve.png"]
