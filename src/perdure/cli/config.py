"""``perdure config show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.flags import Command, Group
from perdure.cli.output import JsonOption, print_json

app = typer.Typer(
    cls=Group,
    help="Look at configurations.",
    epilog="Example: perdure config show recipes/tiny.yaml",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Look at configurations."""


@app.command(
    "show",
    cls=Command,
    epilog="Examples:\n\nperdure config show recipes/tiny.yaml seed=7\n\n"
    "perdure config show recipes/tiny.yaml --explain",
)
def show(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML file that describes a run.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings in place of the recipe's."),
    ] = None,
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say above each setting what it means and takes.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print the resolved configuration: every setting, defaults included."""
    from perdure.config import config_digest, explained, load_config, render_yaml
    from perdure.trainers.config import RunConfig, sections_of_other_tasks

    config = load_config(RunConfig, recipe, overrides or ())
    others = sections_of_other_tasks(config)
    if json:
        print_json({"config": config.model_dump(mode="json"), "digest": config_digest(config)})
    elif explain:
        typer.echo(explained(config, leave_out=others), nl=False)
    else:
        typer.echo(render_yaml(config, leave_out=others), nl=False)
