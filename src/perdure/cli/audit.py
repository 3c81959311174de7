"""``perdure audit``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.output import JsonOption, concerns, print_json
from perdure.cli.runs import open_run
from perdure.core.errors import AuditFailedError, DamagedError

if TYPE_CHECKING:
    from perdure.audit import AuditReport, DiffReport

EXAMPLES = "Examples:\n\nperdure audit runs/tiny-1\n\nperdure audit runs/tiny-1 --diff runs/tiny-2"


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    *,
    diff: Annotated[
        Path | None,
        typer.Option("--diff", metavar="RUN2", help="Show the first divergence from this run."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Prove from the files alone that nothing was skipped or trained twice."""
    open_run(run)
    if diff is None:
        _prove(run, json=json)
    else:
        open_run(diff)
        # What compares two runs says which one it means.
        concerns(None)
        _compare(run, diff, json=json)


def _prove(run: Path, *, json: bool) -> None:
    from perdure.audit import audit_run

    report = audit_run(run)
    _print(report, json=json)
    if not report.ok:
        damaged = any(finding.severity == "damage" for finding in report.findings)
        error = DamagedError if damaged else AuditFailedError
        raise error("the audit found problems", where=str(run), way_out="see the findings above")


def _compare(run: Path, other: Path, *, json: bool) -> None:
    from perdure.audit import diff_runs

    report = diff_runs(run, other)
    _print(report, json=json)
    if not report.ok:
        raise AuditFailedError(
            "the runs differ", where=f"{run} and {other}", way_out="see the first divergence above"
        )


def _print(report: AuditReport | DiffReport, *, json: bool) -> None:
    if json:
        print_json(report.to_json())
    else:
        for line in report.summary_lines():
            typer.echo(line)
