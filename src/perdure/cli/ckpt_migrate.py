"""``perdure ckpt migrate``: a checkpoint of older schema versions, stored once more."""

from __future__ import annotations

import importlib
import os
import sys
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

    module, colon, name = source.partition(":")
    if not colon or not module or not name:
        raise _refused(source, "is not MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise _refused(source, f"cannot be imported ({type(error).__name__}: {error})") from error
    if not isinstance(found, Migrations):
        raise _refused(source, "is not a perdure.checkpoint.Migrations")
    return found


def _refused(source: str, what: str) -> ConfigError:
    return ConfigError(
        what,
        where=f"--with {source}",
        rule="it names an object of a module, for example my_script:migrations",
        way_out="correct it, or run the command where the module lies",
    )
