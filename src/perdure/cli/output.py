"""Where commands write: people read text, programs read one JSON document per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from perdure.core.errors import PerdureError, StorageError

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def report_error(error: PerdureError) -> None:
    """One sentence on standard error: what, where, rule, way out."""
    typer.echo(f"perdure: {error}", err=True)


def file_refusal(error: OSError) -> StorageError:
    """What a file that is read or drawn for people, outside the storage, was refused with."""
    from perdure.storage.refusals import refusal

    return refusal(
        "open, read or write", where=str(error.filename or "standard output"), error=error
    )


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on one line; flushed, so that a pipe sees it at once."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()
