"""``perdure train`` and ``perdure resume``."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.output import JsonOption, concerns
from perdure.cli.runs import chosen_run_dir, new_run_dir, open_run, unfinished_run

if TYPE_CHECKING:
    from perdure.cli.display import Display

TRAIN_EXAMPLES = (
    "Examples:\n\n"
    "perdure train recipes/sort_digits.yaml\n\n"
    "perdure train recipes/tiny.yaml seed=7 trainer.total_steps=50 --run runs/try\n\n"
    "perdure train recipes/tiny.yaml mode=separate_async runtime=ray ray.address=127.0.0.1:6379"
)
ALREADY_COMPLETE = (
    "the run was complete already; its length is part of what it is: a longer one is a new run,"
    " `perdure train RECIPE trainer.total_steps=N`"
)
NOT_FINISHED = "{0} is not finished: `perdure resume {0}` goes on with it"
RESUME_EXAMPLES = (
    "Examples:\n\nperdure resume runs/tiny-1\n\nperdure resume runs/tiny-1 --take-over\n\n"
    "perdure resume runs/tiny-1 checkpoint.keep=5\n\n"
    "perdure resume runs/lost checkpoint.remote=s3://bucket/tiny\n\n"
    "perdure resume runs/tiny-1 runtime=local"
)


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML file that describes the run.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings in place of the recipe's."),
    ] = None,
    *,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="New or empty directory; by default runs/RECIPE-1, -2, …."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Start a run: train the model of a recipe."""
    from perdure.config import config_digest, load_config
    from perdure.trainers.config import RunConfig

    run_dir = new_run_dir(recipe.stem) if run is None else chosen_run_dir(run)
    config = load_config(RunConfig, recipe, overrides or ())
    concerns(run_dir)
    from perdure.trainers.launch import train as launch_train

    digest = config_digest(config)
    left = unfinished_run(recipe.stem, config_digest=digest) if run is None else None
    hint = None if left is None else NOT_FINISHED.format(left)
    with _running(run_dir, json=json, hint=hint) as display:
        launch_train(config, run_dir, display=display)


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Settings for this resume; none that changes the training."
        ),
    ] = None,
    *,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Fence off a process that still holds the run."),
    ] = False,
    no_redo: Annotated[
        bool,
        typer.Option("--no-redo", help="Go on from the checkpoint instead of redoing steps."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Go on with a run that was interrupted, as if nothing had happened."""
    if not any(one.startswith("checkpoint.remote=") for one in overrides or ()):
        open_run(run)
    concerns(run)
    from perdure.trainers.launch import resume as launch_resume

    with _running(run, json=json) as display:
        launch_resume(run, overrides or (), take_over=take_over, redo=not no_redo, display=display)


class _Watch:
    """Passes events on to the display and remembers what the end of the run is told with."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.warm_start = False
        self.went_on = False

    def __call__(self, name: str, fields: dict[str, object]) -> None:
        if name == "run_started":
            self.warm_start = bool(fields.get("warm_start_steps"))
        # Redone steps and warm-start steps are work too: there was something left to do.
        self.went_on = self.went_on or name in ("step", "redone", "warm_start_step")
        self._display(name, fields)


@contextmanager
def _running(run_dir: Path, *, json: bool, hint: str | None = None) -> Generator[_Watch]:
    """Display for one incarnation; ends with the summary. A run that is stopped has its curve.

    ``hint`` is shown first.
    """
    from perdure.cli.display import make_display
    from perdure.cli.summary import summarize
    from perdure.core.errors import DamagedError, StoppedError, StorageError
    from perdure.runtime.curves import draw_run

    # The display puts the terminal in order before the process ends; not in a test's thread.
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with make_display(json=json) as display:
        watch = _Watch(display)
        if hint is not None:
            display.note(hint)
        try:
            yield watch
        except StoppedError:
            # What is for people does not stand in the way of the stop.
            with suppress(StorageError, DamagedError):
                draw_run(run_dir)
            raise
        display.summary(summarize(run_dir, warm_start=watch.warm_start))
        if not watch.went_on:
            display.note(ALREADY_COMPLETE)
