"""What an audit and a comparison say: findings with a severity, counts, lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Severity = Literal["damage", "violation", "note"]

MAX_LINES = 40
"""Findings that :meth:`AuditReport.summary_lines` spells out; the JSON has all."""


_SCRIPT = "  the run of a script, which logs no experience: checked are checkpoints and their log"
_OF_SCRIPTS = ("incarnations.", "log.", "checkpoints.")
"""Counts of what the run of a script has."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or worth knowing.

    Attributes:
        severity: ``damage``: durable bytes are missing or wrong. ``violation``: the bytes are right
            and what they say breaks a promise. ``note``: neither, but good to know.
        where: File and offset, group, step or checkpoint.
        what: What was found, in one clause.
        rule: The promise it is measured by.
    """

    severity: Severity
    where: str
    what: str
    rule: str

    def line(self) -> str:
        return f"{self.severity}: {self.where}: {self.what}; {self.rule}"

    def to_json(self) -> dict[str, str]:
        return {
            "severity": self.severity,
            "where": self.where,
            "what": self.what,
            "rule": self.rule,
        }


class Findings:
    """Collects findings in the order in which they are made."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def damage(self, where: str, what: str, rule: str) -> None:
        self.all.append(Finding("damage", where, what, rule))

    def violation(self, where: str, what: str, rule: str) -> None:
        self.all.append(Finding("violation", where, what, rule))

    def note(self, where: str, what: str, rule: str) -> None:
        self.all.append(Finding("note", where, what, rule))

    @property
    def damaged(self) -> bool:
        return any(finding.severity == "damage" for finding in self.all)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Outcome of :func:`perdure.audit.audit_run`.

    Attributes:
        script: The run of a script with a loop of its own, which logs no experience.
    """

    run: Path
    findings: tuple[Finding, ...]
    counts: Mapping[str, int]
    script: bool = False

    @property
    def ok(self) -> bool:
        """Neither damage nor a violation; notes do not matter."""
        return all(finding.severity == "note" for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        return {
            "run": str(self.run),
            "ok": self.ok,
            "script": self.script,
            "findings": [finding.to_json() for finding in self.findings],
            "counts": dict(self.counts),
        }

    def summary_lines(self) -> list[str]:
        """The verdict, the counts, and every damage and violation before the notes."""
        verdict = "nothing lost, nothing skipped, nothing trained twice"
        if self.script:
            verdict = "its checkpoints and their log hold"
        if not self.ok:
            broken = sum(finding.severity != "note" for finding in self.findings)
            verdict = f"NOT PROVED ({broken} {'problem' if broken == 1 else 'problems'})"
        lines = [f"audit of {self.run}: {verdict}"]
        if self.script:
            lines.append(_SCRIPT)
        counts = self.counts.items()
        lines += _count_lines(
            {name: n for name, n in counts if not self.script or name.startswith(_OF_SCRIPTS)}
        )
        ordered = sorted(self.findings, key=lambda finding: finding.severity == "note")
        return [*lines, *_limited([finding.line() for finding in ordered])]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place, in training order, at which two runs are not the same."""

    where: str
    aspect: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Outcome of :func:`perdure.audit.diff_runs`; no divergence means that the runs are equal."""

    first: Path
    second: Path
    divergence: Divergence | None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def ok(self) -> bool:
        return self.divergence is None

    def to_json(self) -> dict[str, object]:
        found = self.divergence
        return {
            "first": str(self.first),
            "second": str(self.second),
            "ok": self.ok,
            "divergence": None
            if found is None
            else {
                "where": found.where,
                "aspect": found.aspect,
                "first": found.first,
                "second": found.second,
            },
            "counts": dict(self.counts),
        }

    def summary_lines(self) -> list[str]:
        compared = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        if self.divergence is None:
            return [f"{self.first} and {self.second} are equal ({compared})"]
        return [
            f"{self.first} and {self.second} differ; the same until then: {compared}",
            f"first divergence: {self.divergence.where}: {self.divergence.aspect}",
            f"  {self.first}: {self.divergence.first}",
            f"  {self.second}: {self.divergence.second}",
        ]


def _count_lines(counts: Mapping[str, int]) -> Iterable[str]:
    lines: dict[str, list[str]] = {}
    for name, count in counts.items():
        topic, _, rest = name.partition(".")
        lines.setdefault(topic, []).append(f"{rest.replace('_', ' ')} {count:,}")
    return (f"  {topic}: {', '.join(parts)}" for topic, parts in lines.items())


def _limited(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[:MAX_LINES], f"… and {len(lines) - MAX_LINES} more (--json lists all)"]
