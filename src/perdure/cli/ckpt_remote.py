"""``perdure ckpt pull`` and ``perdure ckpt push``: a run and its remote tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.checkpoints import RunArgument
from perdure.cli.output import JsonOption, concerns, print_json
from perdure.cli.runs import open_run

PULL_EXAMPLES = (
    "Examples:\n\nperdure ckpt pull s3://bucket/tiny runs/tiny\n\n"
    "perdure ckpt pull s3://bucket/tiny runs/tiny --checkpoint step-00000080-1"
)
PUSH_EXAMPLES = "Example: perdure ckpt push runs/tiny s3://bucket/tiny"

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="s3://bucket/prefix or file:///path, one for each run.")
]


def pull_run(
    url: UrlArgument,
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="An empty directory, or that of the same run.")
    ],
    *,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="NAME",
            help="The only one to fetch; by default all that are there.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fetch a run from its remote tier, or what its directory lacks, so that it can be resumed.

    Credentials, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_REGION,
    AWS_ENDPOINT_URL, …). An interrupted pull goes on where it stopped.
    """
    from perdure.checkpoint.tier import TierContext, open_objects, pull
    from perdure.core.clock import SystemClock
    from perdure.storage import PosixStorage

    concerns(run)
    context = TierContext(SystemClock(), address=url)
    report = pull(PosixStorage(run), open_objects(url), context=context, checkpoint=checkpoint)
    if json:
        skipped = [{"checkpoint": name, "reason": reason} for name, reason in report.skipped]
        fields = {"run_id": report.run_id, "incarnation": report.incarnation, "skipped": skipped}
        sizes = {"bytes": report.bytes, "exposed_s": report.exposed_s}
        print_json({"run": str(run), "checkpoint": report.checkpoint, **fields, **sizes})
        return
    for name, reason in report.skipped:
        typer.echo(f"{name} is damaged in the remote tier: {reason}")
    typer.echo(
        f"{report.checkpoint or 'no checkpoint yet'}: {report.bytes:,} bytes fetched to {run};"
        f" the log was complete {report.exposed_s:,.0f} s ago"
    )


def push_run(run: RunArgument, url: UrlArgument, *, json: JsonOption = False) -> None:
    """Ship what the remote tier lacks of a run: log, small files, newest checkpoint.

    It may run beside the process that trains. An interrupted push goes on where it stopped.
    """
    from perdure.checkpoint.tier import TierContext, open_objects, push
    from perdure.core.clock import SystemClock
    from perdure.experience import read_experience
    from perdure.experience.claims import highest_incarnation
    from perdure.runtime.ledger import LogLedger

    storage = open_run(run)
    state, _ = read_experience(storage)
    head = push(
        storage,
        open_objects(url),
        ledger=LogLedger(state),
        incarnation=highest_incarnation(storage),
        context=TierContext(SystemClock(), address=url),
    )
    newest = head.target.directory if head.target else ""
    names = [one.directory for one in head.checkpoints]
    if json:
        fields = {"incarnation": head.incarnation, "log_bytes": sum(head.log.values())}
        print_json({"run": str(run), "checkpoint": newest, "checkpoints": names, **fields})
        return
    typer.echo(f"{newest or 'no checkpoint yet'}: {url} holds {', '.join(names) or 'the log'}")
