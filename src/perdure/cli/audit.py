"""``perdure audit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run
from perdure.core.errors import AuditFailedError, DamagedError

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
    from perdure.audit import audit_run, diff_runs

    if diff is None:
        report = audit_run(run)
    else:
        open_run(diff)
        report = diff_runs(run, diff)
    if json:
        print_json(report.to_json())
    else:
        for line in report.summary_lines():
            typer.echo(line)
    if report.ok:
        return
    if diff is not None:
        raise AuditFailedError(
            "the runs differ", where=f"{run} and {diff}", way_out="see the first divergence above"
        )
    damaged = any(finding.severity == "damage" for finding in report.findings)
    error = DamagedError if damaged else AuditFailedError
    raise error("the audit found problems", where=str(run), way_out="see the findings above")
