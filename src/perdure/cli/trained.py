"""``perdure sample`` and ``perdure export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.checkpoints import committed_checkpoints, find_checkpoint
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run

if TYPE_CHECKING:
    from perdure.trainers.trained import Sample, Trained

SAMPLE_EXAMPLES = (
    "Examples:\n\nperdure sample runs/tiny-1\n\n"
    "perdure sample runs/tiny-1 --checkpoint step-00000080-1 --prompts 50"
)
EXPORT_EXAMPLES = "Example: perdure export runs/tiny-1 exports/tiny"

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="NAME", help="Which one; the newest whole by default."),
]
SHOWN = 20
"""Answers that are shown when nobody says how many."""


def sample(
    run: RunArgument,
    *,
    checkpoint: CheckpointOption = None,
    prompts: Annotated[
        int,
        typer.Option("--prompts", min=1, metavar="N", help="How many held-out prompts to ask."),
    ] = SHOWN,
    json: JsonOption = False,
) -> None:
    """Show greedy answers of the trained policy beside the expected ones."""
    trained = _read(run, checkpoint)
    from perdure.trainers.trained import sample as ask

    samples = ask(trained, prompts)
    accuracy = sum(s.correct for s in samples) / len(samples)
    if json:
        from dataclasses import asdict

        head = {**_said_of(run, trained), "accuracy": accuracy}
        print_json({**head, "samples": [asdict(s) for s in samples]})
        return
    for line in _lines(samples):
        typer.echo(line)
    typer.echo(f"{trained.checkpoint}: accuracy {accuracy:.2f} of {len(samples)} held-out prompts")


def export(
    run: RunArgument,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="New or empty directory for the model.")
    ],
    *,
    checkpoint: CheckpointOption = None,
    json: JsonOption = False,
) -> None:
    """Write the trained policy in Hugging Face format: config.json and model.safetensors."""
    trained = _read(run, checkpoint)
    from perdure.trainers.trained import export as write

    write(trained, directory)
    if json:
        print_json({**_said_of(run, trained), "directory": str(directory)})
    else:
        typer.echo(f"policy of {trained.checkpoint} written to {directory}")


def _read(run: Path, checkpoint: str | None) -> Trained:
    records = committed_checkpoints(open_run(run))
    if checkpoint is not None:
        records = [find_checkpoint(records, checkpoint, run)]
    from perdure.trainers.trained import read_trained

    trained = read_trained(run, records)
    for damaged in trained.passed_over:
        typer.echo(f"warning: {damaged}: passed over, an older one is whole", err=True)
    return trained


def _said_of(run: Path, trained: Trained) -> dict[str, object]:
    passed_over = list(trained.passed_over)
    return {"run": str(run), "checkpoint": trained.checkpoint, "passed_over": passed_over}


def _lines(samples: list[Sample]) -> list[str]:
    cells: list[tuple[str, ...]] = [("prompt", "answer", "expected", "")]
    for one in samples:
        texts = (one.prompt, one.response, one.expected)
        cells.append((*(_visible(t) for t in texts), "right" if one.correct else "wrong"))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return [
        "  ".join([*(f"{t:<{w}}" for t, w in zip(line, widths, strict=False)), line[3]]).rstrip()
        for line in cells
    ]


def _visible(text: str) -> str:
    """One line, whatever the model wrote."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
