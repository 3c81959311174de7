"""``perdure ckpt list|verify|show``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.checkpoint_table import NONE_YET, Row, look_at, table
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run
from perdure.core.errors import DamagedError, NothingToResumeError

if TYPE_CHECKING:
    from perdure.checkpoint import Quarantined, VerifyReport
    from perdure.core.records import Checkpointed
    from perdure.core.storage_api import Storage

app = typer.Typer(
    help="List, verify and show the checkpoints of a run.",
    epilog="Example: perdure ckpt list runs/tiny-1",
    no_args_is_help=True,
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]


@app.command("list", epilog="Example: perdure ckpt list runs/tiny-1")
def list_checkpoints(run: RunArgument, *, json: JsonOption = False) -> None:
    """List the committed checkpoints, oldest first."""
    from perdure.checkpoint.manifest import CHECKPOINTS

    storage = open_run(run)
    # Looked at before the log is read: a live run deletes what its log has given up.
    there = {name: look_at(storage, name) for name in storage.list(CHECKPOINTS)}
    rows = [
        Row(record, there.get(record.directory) or look_at(storage, record.directory))
        for record in committed_checkpoints(storage)
    ]
    if json:
        print_json({"run": str(run), "checkpoints": [row.to_json() for row in rows]})
        return
    for line in table(rows):
        typer.echo(line)
    if not rows:
        typer.echo(NONE_YET)


@app.command("verify", epilog="Example: perdure ckpt verify runs/tiny-1")
def verify_checkpoints(
    run: RunArgument,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CHECKPOINT", help="One of them; all by default.")
    ] = None,
    *,
    json: JsonOption = False,
) -> None:
    """Check every byte of the committed checkpoints against manifest and log."""
    storage = open_run(run)
    records = committed_checkpoints(storage)
    if checkpoint is not None:
        records = [find_checkpoint(records, checkpoint, run)]
    reports = [_verify(storage, record) for record in records]
    if not all(report.ok for report in reports):
        # A live run may have collected it since its log was read, and says so before it deletes.
        kept = {record.directory for record in committed_checkpoints(storage)}
        reports = [report for report in reports if report.ok or report.directory in kept]
    set_aside = _quarantined(storage, reports)
    if json:
        rows = [_report_json(r, set_aside.get(r.directory)) for r in reports]
        print_json({"run": str(run), "checkpoints": rows})
    else:
        for report in reports:
            typer.echo(
                f"{report.directory:<24} {_verdict(report, set_aside.get(report.directory))}"
            )
        if not reports:
            typer.echo(NONE_YET)
    _refuse_damaged(run, reports, set_aside, asked=checkpoint)


@app.command("show", epilog="Example: perdure ckpt show runs/tiny-1 step-00000020-1")
def show_checkpoint(
    run: RunArgument,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CHECKPOINT", help="Which one; the newest by default.")
    ] = None,
    *,
    json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds: clocks, lineage, components, files."""
    storage = open_run(run)
    records = committed_checkpoints(storage)
    record = find_checkpoint(records, checkpoint, run) if checkpoint else _newest(records, run)
    report = _verify(storage, record)
    manifest = report.manifest
    if manifest is None:
        aside = _quarantined(storage, [report]).get(record.directory)
        raise DamagedError(
            report.reason if aside is None else _set_aside(aside),
            where=f"{run}: {record.directory}",
            rule="a checkpoint is shown from its manifest",
            way_out="show another one: `perdure ckpt list` names them; or restore it from a copy",
        )
    if json:
        import json as json_text

        print_json({**json_text.loads(manifest.encode()), "ok": report.ok})
        return
    typer.echo(f"{record.directory}  {manifest.bytes:,} bytes  {'ok' if report.ok else 'DAMAGED'}")
    for title, pairs in (
        ("clocks", manifest.info.clocks),
        ("lineage", manifest.info.lineage),
        ("versions", manifest.versions),
    ):
        typer.echo(f"{title}: " + ", ".join(f"{key} {value}" for key, value in pairs.items()))
    typer.echo(f"config {manifest.info.config_digest}, data {manifest.info.dataset_digest}")
    for name, entry in manifest.components.items():
        typer.echo(f"  {name:<24} {entry.kind} (schema {entry.schema_version})")
    for path, file in manifest.files.items():
        typer.echo(f"  {path:<36} {file.bytes:>12,}  {file.checksum}")


def committed_checkpoints(storage: Storage) -> list[Checkpointed]:
    """Commits of the kept lineage, oldest first."""
    from perdure.experience import read_experience

    state, _ = read_experience(storage)
    return list(state.checkpoints)


def _verify(storage: Storage, record: Checkpointed) -> VerifyReport:
    from perdure.checkpoint import verify

    return verify(storage, record.directory, manifest_digest=record.manifest_digest)


def _quarantined(storage: Storage, reports: Sequence[VerifyReport]) -> dict[str, Quarantined]:
    from perdure.checkpoint import quarantined

    bad = [report.directory for report in reports if not report.ok]
    found = {name: quarantined(storage, name) for name in bad}
    return {name: aside for name, aside in found.items() if aside is not None}


def _verdict(report: VerifyReport, aside: Quarantined | None) -> str:
    if report.ok:
        return "ok"
    return report.reason if aside is None else _set_aside(aside)


def _set_aside(aside: Quarantined) -> str:
    return f"quarantined ({aside.reason}), see {aside.path}"


def _report_json(report: VerifyReport, aside: Quarantined | None) -> dict[str, object]:
    row: dict[str, object] = {
        "checkpoint": report.directory,
        "ok": report.ok,
        "problems": {problem.file: problem.reason for problem in report.problems},
    }
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
        rule="every file has the size and checksum of the manifest",
        way_out=way_out,
    )


def _newest(records: Sequence[Checkpointed], run: Path) -> Checkpointed:
    if not records:
        raise NothingToResumeError(
            "no checkpoint was committed yet", where=str(run), way_out="let the run go on"
        )
    return records[-1]


def find_checkpoint(records: Sequence[Checkpointed], name: str, run: Path) -> Checkpointed:
    """The commit of the checkpoint called ``name``.

    Raises:
        NothingToResumeError: There is none; names the nearest.
    """
    from perdure.config import nearest

    by_name = {record.directory: record for record in records}
    if name not in by_name:
        close = nearest(name, by_name)
        raise NothingToResumeError(
            f"no checkpoint {name!r}",
            where=str(run),
            rule="committed checkpoints are listed by `perdure ckpt list`",
            way_out=f"did you mean {close!r}?" if close else "name one of the list",
        )
    return by_name[name]
