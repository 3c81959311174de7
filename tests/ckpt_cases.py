"""Runs of a small script with its own loop, and the command line over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from perdure import CheckpointEngine, every
from perdure.checkpoint.keep import Keep
from perdure.cli import main as cli

RUNNER = CliRunner()
WEIGHTS = 5_000_000
"""Numbers of the model: 20 MB, three chunks of 8 MiB."""
CHUNK = 8 << 20


def perdure(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = RUNNER.invoke(
        cli.app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"}
    )
    return result.exit_code, result.stdout, result.stderr


def script(
    run: Path,
    *,
    steps: int,
    weights: int = 8,
    keep: int | Keep = 5,
    each: Callable[[int], None] = lambda _: None,
    **more: Any,
) -> None:
    """Train, saving every step: weights grow by one, and so does a counter."""
    engine = CheckpointEngine(run, save=every(steps=1), keep=keep)
    model, counter = np.zeros(weights, np.float32), {"seen": 0, "name": "x"}
    engine.register(model=model, counter=counter, **more)
    for step in engine.steps(steps, change_total=True):
        model += 1
        counter["seen"] = step
        each(step)
        engine.save()
        while engine._run is not None and engine._run.saver.pending:
            engine._run.saver.wait(30)


def names(run: Path) -> list[str]:
    """Directories of the checkpoints that lie there."""
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def flip(path: Path, offset: int) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
