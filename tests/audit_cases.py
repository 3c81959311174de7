"""What the audit's tests share: edits of a history, and what an audit of it must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import audit_writer as w

from perdure.audit import AuditReport, audit_run

Records = list[w.Rec]
Edit = Callable[[Records], None]


def damages(report: AuditReport) -> list[str]:
    return [finding.line() for finding in report.findings if finding.severity == "damage"]


def assert_damage(run: Path, *texts: str) -> None:
    report = audit_run(run)
    assert not report.ok
    lines = damages(report)
    for text in texts:
        assert any(text in line for line in lines), lines


def assert_clean(run: Path) -> AuditReport:
    report = audit_run(run)
    assert report.ok, report.summary_lines()
    assert not report.findings
    return report


def violations(report: AuditReport) -> list[str]:
    return [finding.line() for finding in report.findings if finding.severity == "violation"]


def assert_violation(run: Path, text: str) -> None:
    report = audit_run(run)
    assert not report.ok
    assert any(text in line for line in violations(report)), report.summary_lines()


def find(records: Records, name: str, **fields: object) -> int:
    """Index of the first record of a kind with these fields."""
    return next(
        index
        for index, record in enumerate(records)
        if record.name == name and fields.items() <= record.fields.items()
    )


def drop(name: str, **fields: object) -> Edit:
    return lambda records: records.__delitem__(find(records, name, **fields))


def change(name: str, *, to: w.Rec) -> Edit:
    return lambda records: records.__setitem__(find(records, name), to)


def set_field(name: str, **fields: object) -> Edit:
    return lambda records: records[find(records, name)].fields.update(fields)


def add(*new: w.Rec, before: str = "") -> Edit:
    def edit(records: Records) -> None:
        index = find(records, before) if before else len(records)
        records[index:index] = new

    return edit
