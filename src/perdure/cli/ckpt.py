"""``perdure ckpt list|verify|show``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run
from perdure.core.errors import DamagedError, NothingToResumeError

if TYPE_CHECKING:
    from perdure.checkpoint import VerifyReport
    from perdure.core.records import Checkpointed
    from perdure.core.storage_api import Storage

app = typer.Typer(help="List, verify and show the checkpoints of a run.", no_args_is_help=True)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]


@app.command("list", epilog="Example: perdure ckpt list runs/tiny-1")
def list_checkpoints(run: RunArgument, *, json: JsonOption = False) -> None:
    """List the committed checkpoints, oldest first."""
    from perdure.checkpoint.manifest import CHECKPOINTS, MANIFEST, directory_path

    storage = open_run(run)
    # Looked at before the log is read: a live run deletes what its log has given up.
    there = {
        n for n in storage.list(CHECKPOINTS) if storage.exists(f"{CHECKPOINTS}/{n}/{MANIFEST}")
    }
    rows: list[dict[str, object]] = [
        {
            "checkpoint": record.directory,
            "phase": record.phase,
            "step": record.step,
            "manifest_digest": record.manifest_digest,
            "present": record.directory in there
            or storage.exists(f"{directory_path(record.directory)}/{MANIFEST}"),
        }
        for record in _committed(storage)
    ]
    if json:
        print_json({"run": str(run), "checkpoints": rows})
        return
    for row in rows:
        state = "" if row["present"] else "  MISSING"
        typer.echo(f"{row['checkpoint']:<24} {row['phase']} step {row['step']}{state}")
    if not rows:
        typer.echo("no committed checkpoint yet")


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
    records = _committed(storage)
    if checkpoint is not None:
        records = [_find(records, checkpoint, run)]
    reports = [_verify(storage, record) for record in records]
    if not all(report.ok for report in reports):
        # A live run may have collected it since its log was read, and says so before it deletes.
        kept = {record.directory for record in _committed(storage)}
        reports = [report for report in reports if report.ok or report.directory in kept]
    if json:
        print_json({"run": str(run), "checkpoints": [_report_json(r) for r in reports]})
    else:
        for report in reports:
            typer.echo(f"{report.directory:<24} {'ok' if report.ok else report.reason}")
    bad = [report.directory for report in reports if not report.ok]
    if bad:
        raise DamagedError(
            f"{len(bad)} of {len(reports)} checkpoints are damaged: {', '.join(bad)}",
            where=str(run),
            rule="every file has the size and checksum of the manifest",
            way_out="resume uses the newest whole one; restore the others from a copy",
        )


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
    records = _committed(storage)
    record = _find(records, checkpoint, run) if checkpoint else _newest(records, run)
    report = _verify(storage, record)
    manifest = report.manifest
    if manifest is None:
        raise DamagedError(
            report.reason,
            where=f"{run}: {record.directory}",
            way_out="resume uses the newest whole one; restore this one from a copy",
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


def _committed(storage: Storage) -> list[Checkpointed]:
    from perdure.experience import read_experience

    state, _ = read_experience(storage)
    return list(state.checkpoints)


def _verify(storage: Storage, record: Checkpointed) -> VerifyReport:
    from perdure.checkpoint import verify

    return verify(storage, record.directory, manifest_digest=record.manifest_digest)


def _report_json(report: VerifyReport) -> dict[str, object]:
    return {
        "checkpoint": report.directory,
        "ok": report.ok,
        "problems": {problem.file: problem.reason for problem in report.problems},
    }


def _newest(records: Sequence[Checkpointed], run: Path) -> Checkpointed:
    if not records:
        raise NothingToResumeError(
            "no checkpoint was committed yet", where=str(run), way_out="let the run go on"
        )
    return records[-1]


def _find(records: Sequence[Checkpointed], name: str, run: Path) -> Checkpointed:
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
