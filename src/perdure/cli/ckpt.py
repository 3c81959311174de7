"""``perdure ckpt``: its commands, and of them ``list`` and ``show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import checkpoints
from perdure.cli.checkpoint_table import NONE_YET, Row, look_at, table
from perdure.cli.checkpoints import (
    RunArgument,
    address_of,
    describe,
    find_checkpoint,
    set_aside,
)
from perdure.cli.ckpt_diff import DIFF_EXAMPLES, diff_checkpoints
from perdure.cli.ckpt_export import EXPORT_EXAMPLES, export_checkpoint
from perdure.cli.ckpt_gc import GC_EXAMPLES, collect_checkpoints
from perdure.cli.ckpt_migrate import MIGRATE_EXAMPLES, migrate_checkpoint
from perdure.cli.ckpt_remote import PULL_EXAMPLES, PUSH_EXAMPLES, pull_run, push_run
from perdure.cli.ckpt_verify import VERIFY_EXAMPLES, verify_checkpoints
from perdure.cli.flags import Command, Group
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run
from perdure.core.errors import DamagedError

if TYPE_CHECKING:
    from perdure.checkpoint import VerifyReport
    from perdure.core.records import Checkpointed
    from perdure.core.storage_api import Storage

app = typer.Typer(
    cls=Group,
    help="List, verify, compare, collect and move the checkpoints of a run.",
    epilog="Example: perdure ckpt list runs/tiny-1",
    no_args_is_help=True,
)


app.command("verify", cls=Command, epilog=VERIFY_EXAMPLES)(verify_checkpoints)
app.command("diff", cls=Command, epilog=DIFF_EXAMPLES)(diff_checkpoints)
app.command("export", cls=Command, epilog=EXPORT_EXAMPLES)(export_checkpoint)
app.command("gc", cls=Command, epilog=GC_EXAMPLES)(collect_checkpoints)
app.command("migrate", cls=Command, epilog=MIGRATE_EXAMPLES)(migrate_checkpoint)
app.command("pull", cls=Command, epilog=PULL_EXAMPLES)(pull_run)
app.command("push", cls=Command, epilog=PUSH_EXAMPLES)(push_run)


@app.command("list", cls=Command, epilog="Example: perdure ckpt list runs/tiny-1")
def list_checkpoints(run: RunArgument, *, json: JsonOption = False) -> None:
    """List the committed checkpoints, oldest first, and why each is kept."""
    from perdure.checkpoint.manifest import CHECKPOINTS
    from perdure.experience import read_experience
    from perdure.runtime.maintenance import why_kept_now

    storage = open_run(run)
    # Looked at before the log is read: a live run deletes what its log has given up.
    there = {name: look_at(storage, name) for name in storage.list(CHECKPOINTS)}
    state, _ = read_experience(storage)
    why = why_kept_now(storage, state)
    rows = [
        Row(
            record,
            there.get(record.directory) or look_at(storage, record.directory),
            why.get(record.directory, ()),
        )
        for record in state.checkpoints
    ]
    if json:
        print_json({"run": str(run), "checkpoints": [row.to_json() for row in rows]})
        return
    for line in table(rows):
        typer.echo(line)
    if not rows:
        typer.echo(NONE_YET)


@app.command("show", cls=Command, epilog="Example: perdure ckpt show runs/tiny-1 step-00000080-1")
def show_checkpoint(
    run: RunArgument,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CHECKPOINT", help="Which one; the newest by default.")
    ] = None,
    *,
    digests: Annotated[
        bool,
        typer.Option(
            "--digests",
            help="Digest of each component's tensors: equal for equal tensors, whatever ranks"
            " have stored them.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds: clocks, lineage, components, files, segments."""
    from perdure.checkpoint.manifest import MANIFEST, directory_path

    run, checkpoint = address_of(run, checkpoint)
    storage = open_run(run)
    records = checkpoints.committed_checkpoints(storage)
    record = find_checkpoint(records, checkpoint, run)
    report = _verify(storage, record)
    manifest = report.manifest
    if manifest is None:
        aside = set_aside(storage, [report]).get(record.directory)
        raise DamagedError(
            report.reason if aside is None else describe(aside),
            where=f"{run}: {record.directory}",
            rule="a checkpoint is shown from its manifest",
            way_out="show another one: `perdure ckpt list` names them; or restore it from a copy",
        )
    if json:
        import json as json_text

        found = {"digests": _digests(storage, report)} if digests else {}
        stored = storage.read(f"{directory_path(record.directory)}/{MANIFEST}")
        print_json({**json_text.loads(stored), "ok": report.ok, **found})
        return
    verdict = "ok" if report.ok else f"DAMAGED: {report.reason}"
    typer.echo(f"{record.directory}  {manifest.bytes:,} bytes  {verdict}")
    for title, pairs in (
        ("clocks", manifest.info.clocks),
        ("lineage", manifest.info.lineage),
        ("versions", manifest.versions),
    ):
        typer.echo(f"{title}: " + ", ".join(f"{key} {value}" for key, value in pairs.items()))
    if manifest.info.config_digest:
        # A script of one's own has neither.
        typer.echo(f"config {manifest.info.config_digest}, data {manifest.info.dataset_digest}")
    if manifest.ranks > 1:
        typer.echo(f"stored by {manifest.ranks} ranks")
    known = _digests(storage, report) if digests else {}
    for name, entry in manifest.components.items():
        tensors = f", tensors {known[name]}" if name in known else ""
        typer.echo(f"  {name:<24} {entry.kind} (schema {entry.schema_version}){tensors}")
    for path, file in manifest.files.items():
        sums = file.sums[0] if len(file.sums) == 1 else f"{len(file.sums)} chunks"
        typer.echo(f"  {path:<36} {file.bytes:>12,}  {sums}")
    for name, stored in manifest.segments.items():
        rows = sum(one.rows for one in stored)
        typer.echo(f"segments of {name}: {len(stored)}, {rows:,} rows, shared with others")
        for one in stored:
            typer.echo(f"  {one.path:<36} {one.bytes:>12,}  {one.checksum}")


def _digests(storage: Storage, report: VerifyReport) -> dict[str, str]:
    """Component → digest of its tensors, whatever ranks have stored them; none of a damaged one."""
    from perdure.checkpoint import CheckpointReader

    if not report.ok or report.manifest is None:
        return {}
    reader, components = CheckpointReader(storage, report.manifest), report.manifest.components
    return {
        name: reader.digest(name)
        for name, entry in components.items()
        if entry.tensor_file or entry.shards
    }


def _verify(storage: Storage, record: Checkpointed) -> VerifyReport:
    from perdure.checkpoint import verify

    return verify(storage, record.directory, manifest_digest=record.manifest_digest)
