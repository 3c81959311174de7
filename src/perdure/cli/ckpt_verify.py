"""``perdure ckpt verify``: every byte of every committed checkpoint, several files at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import checkpoints
from perdure.cli.checkpoint_table import NONE_YET
from perdure.cli.checkpoints import RunArgument, address_of, describe, find_checkpoint, set_aside
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run
from perdure.core.cores import usable_cores
from perdure.core.errors import DamagedError

if TYPE_CHECKING:
    from perdure.checkpoint import Quarantined, VerifyReport
    from perdure.core.records import Checkpointed
    from perdure.core.storage_api import Storage

VERIFY_EXAMPLES = (
    "Examples:\n\nperdure ckpt verify runs/tiny-1\n\n"
    "perdure ckpt verify runs/tiny-1 step-00000080-1 --json"
)


def verify_checkpoints(
    run: RunArgument,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CHECKPOINT", help="One of them; all by default.")
    ] = None,
    *,
    threads: Annotated[
        int,
        typer.Option("--threads", min=0, metavar="N", help="Files at once; 0: one a core."),
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Check every byte of the committed checkpoints against manifest and log.

    Damage is told by file and, where the manifest has checksums of them, by chunk of 8 MiB.
    """
    run, checkpoint = address_of(run, checkpoint)
    storage = open_run(run)
    records = checkpoints.committed_checkpoints(storage)
    if checkpoint is not None:
        records = [find_checkpoint(records, checkpoint, run)]
    with ThreadPoolExecutor(threads or usable_cores()) as executor:
        reports = [_verify(storage, record, executor) for record in records]
    if not all(report.ok for report in reports):
        # A live run may have collected it since its log was read, and says so before it deletes.
        kept = {record.directory for record in checkpoints.committed_checkpoints(storage)}
        reports = [report for report in reports if report.ok or report.directory in kept]
    aside = set_aside(storage, reports)
    if json:
        rows = [_report_json(r, aside.get(r.directory)) for r in reports]
        print_json({"run": str(run), "checkpoints": rows})
    else:
        for report in reports:
            typer.echo(f"{report.directory:<24} {_verdict(report, aside.get(report.directory))}")
        if not reports:
            typer.echo(NONE_YET)
    _refuse_damaged(run, reports, aside, asked=checkpoint)


def _verify(storage: Storage, record: Checkpointed, executor: ThreadPoolExecutor) -> VerifyReport:
    from perdure.checkpoint import verify

    digest = record.manifest_digest
    return verify(storage, record.directory, manifest_digest=digest, executor=executor)


def _verdict(report: VerifyReport, aside: Quarantined | None) -> str:
    if report.ok:
        return "ok"
    return report.reason if aside is None else describe(aside)


def _report_json(report: VerifyReport, aside: Quarantined | None) -> dict[str, object]:
    row: dict[str, object] = {
        "checkpoint": report.directory,
        "ok": report.ok,
        "problems": {problem.file: problem.reason for problem in report.problems},
    }
    chunks = {p.file: list(p.chunks) for p in report.problems if p.chunks}
    if chunks:
        row["chunks"] = chunks
    if aside is not None:
        row["quarantined"] = {"path": aside.path, "reason": aside.reason}
    return row


def _refuse_damaged(
    run: Path, reports: Sequence[VerifyReport], set_aside: Collection[str], *, asked: str | None
) -> None:
    """Fail for damage that recovery has not dealt with, and for a run that has nothing left.

    Args:
        set_aside: Directories of those that are in quarantine.
        asked: The one checkpoint that was asked for; None means all of them.
    """
    bad = [r.directory for r in reports if not r.ok and r.directory not in set_aside]
    whole = any(report.ok for report in reports)
    if not bad and (whole or asked or not reports):
        return
    if whole:
        way_out = "resume uses the newest whole one; restore the others from a copy"
    elif asked:
        way_out = f"restore it from a copy; `perdure ckpt verify {run}` checks the others"
    else:
        way_out = "there is no whole one to resume from: restore one from a copy"
    names = ", ".join(bad or set_aside)
    raise DamagedError(
        f"{len(bad or set_aside)} of {len(reports)} checkpoints are damaged: {names}",
        where=str(run),
        rule="in a whole one every file has the size and checksum of its manifest",
        way_out=way_out,
    )
