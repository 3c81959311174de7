"""What reports say to people and to programs."""

from __future__ import annotations

import json
from pathlib import Path

from perdure.audit import AuditReport, DiffReport, Divergence, Finding

DAMAGE = Finding("damage", "log/x", "short", "bytes stay")
VIOLATION = Finding("violation", "log/y", "twice", "once")
NOTE = Finding("note", "log/z", "drift", "is reported")
COUNTS = {"groups.submitted": 1234, "groups.trained": 2, "log.tail_bytes_cut": 5}


def test_notes_alone_are_fine() -> None:
    report = AuditReport(Path("run"), (NOTE,), COUNTS)
    assert report.ok
    assert report.summary_lines() == [
        "audit of run: nothing lost, nothing skipped, nothing trained twice",
        "  groups: submitted 1,234, trained 2",
        "  log: tail bytes cut 5",
        "note: log/z: drift; is reported",
    ]


def test_problems_come_before_notes() -> None:
    report = AuditReport(Path("run"), (NOTE, VIOLATION, DAMAGE), {})
    assert not report.ok
    assert report.summary_lines() == [
        "audit of run: NOT PROVED (2 problems)",
        "violation: log/y: twice; once",
        "damage: log/x: short; bytes stay",
        "note: log/z: drift; is reported",
    ]
    assert "(1 problem)" in AuditReport(Path("run"), (DAMAGE,), {}).summary_lines()[0]


def test_summary_is_bounded_and_json_is_not() -> None:
    report = AuditReport(Path("run"), (DAMAGE,) * 100, {})
    lines = report.summary_lines()
    assert len(lines) == 42
    assert lines[-1] == "… and 60 more (--json lists all)"
    value = json.loads(json.dumps(report.to_json()))
    assert len(value["findings"]) == 100
    assert value["findings"][0] == {
        "severity": "damage",
        "where": "log/x",
        "what": "short",
        "rule": "bytes stay",
    }
    assert (value["run"], value["ok"], value["counts"]) == ("run", False, {})


def test_difference() -> None:
    report = DiffReport(
        Path("a"), Path("b"), Divergence("step 2", "digest", "x", "y"), {"steps": 1}
    )
    assert not report.ok
    assert report.summary_lines() == [
        "a and b differ; the same until then: 1 steps",
        "first divergence: step 2: digest",
        "  a: x",
        "  b: y",
    ]
    assert json.loads(json.dumps(report.to_json())) == {
        "first": "a",
        "second": "b",
        "ok": False,
        "divergence": {"where": "step 2", "aspect": "digest", "first": "x", "second": "y"},
        "counts": {"steps": 1},
    }


def test_equality() -> None:
    report = DiffReport(Path("a"), Path("b"), None, {"steps": 3})
    assert report.ok
    assert report.summary_lines() == ["a and b are equal (3 steps)"]
    assert report.to_json()["divergence"] is None
