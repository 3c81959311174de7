"""``perdure ckpt migrate``: a checkpoint of older schema versions, stored once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.checkpoints import RunArgument
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run
from perdure.core.errors import ConfigError

if TYPE_CHECKING:
    from perdure.checkpoint import Migrations

MIGRATE_EXAMPLES = "Example: perdure ckpt migrate runs/mine --with my_script:migrations"


def migrate_checkpoint(
    run: RunArgument,
    *,
    source: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="MODULE:NAME",
            help="The script's Migrations; modules are looked for in this directory too.",
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Store the newest whole checkpoint once more, its components migrated as far as steps lead.

    It becomes a new checkpoint of a new incarnation; nothing is written over the old one. Loading
    migrates by itself: this is for those who want to drop old steps from their script.
    """
    from perdure.core.clock import SystemClock
    from perdure.core.faults import NoFaults
    from perdure.runtime.maintenance import Place
    from perdure.runtime.migrating import migrate_run

    storage = open_run(run)
    done = migrate_run(Place(storage, SystemClock(), NoFaults()), _load(source))
    if json:
        versions = {name: list(pair) for name, pair in done.versions.items()}
        fields = {"source": done.source, "checkpoint": done.target, "versions": versions}
        print_json({"run": str(run), **fields})
        return
    if not done.target:
        typer.echo(f"{done.source}: nothing to migrate")
        return
    for name, (before, after) in done.versions.items():
        typer.echo(f"  {name}: schema version {before} to {after}")
    typer.echo(f"{done.source} stored as {done.target}")


def _load(source: str) -> Migrations:
    """The ``Migrations`` at ``module:name``."""
    from perdure.checkpoint import Migrations
    from perdure.core.imported import imported

    where = f"--with {source}"
    found = imported(source, where=where)
    if not isinstance(found, Migrations):
        raise ConfigError(
            "is not a perdure.checkpoint.Migrations",
            where=where,
            rule="it names an object of a module, for example my_script:migrations",
            way_out="name the Migrations of your script",
        )
    return found
