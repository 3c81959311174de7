"""``perdure ckpt gc``: checkpoints that the rules of retention do not keep."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from perdure.cli.checkpoints import RunArgument
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run
from perdure.core.cores import usable_cores

GC_EXAMPLES = (
    "Examples:\n\nperdure ckpt gc runs/tiny-1 --dry-run\n\nperdure ckpt gc runs/tiny-1 --keep 1"
)


def collect_checkpoints(
    run: RunArgument,
    *,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", min=1, metavar="N", help="Newest checkpoints that stay; as the run says."
        ),
    ] = None,
    drop_archived: Annotated[
        bool,
        typer.Option(
            "--drop-archived", help="Also those that stay for their step or for a metric."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; claim and change nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Delete checkpoints that the run's rules do not keep, and what cut-off saves left behind.

    The run is claimed, so nobody may be training it. The newest checkpoint that verifies, byte by
    byte, always stays, and so does what the remote tier needs; quarantine is not touched.
    """
    from perdure.core.clock import SystemClock
    from perdure.core.faults import NoFaults
    from perdure.runtime.maintenance import Collecting, Place, collect_run, would_collect

    storage = open_run(run)
    asked = Collecting(keep, archival=not drop_archived)
    with ThreadPoolExecutor(usable_cores()) as executor:
        if dry_run:
            done = would_collect(storage, asked, executor=executor)
        else:
            place = Place(storage, SystemClock(), NoFaults())
            done = collect_run(place, asked, executor=executor)
    plan, left = done.plan, done.leftovers
    leftovers = (*left.stale, *left.cut_off, *left.lost)
    if json:
        names = {
            "kept": [*plan.kept],
            "why": plan.kept,
            "collected": plan.surplus,
            "leftovers": leftovers,
        }
        print_json({"run": str(run), "dry_run": dry_run, "verified": plan.verified, **names})
        return
    verb = "would go" if dry_run else "deleted"
    for name, why in plan.kept.items():
        typer.echo(f"{name:<24} kept: {', '.join(why)}")
    for name in plan.surplus:
        typer.echo(f"{name:<24} {verb}")
    for name in leftovers:
        typer.echo(f"{name:<24} {verb} (left behind)")
    if not plan.surplus and not leftovers:
        typer.echo("nothing to collect")
