"""Where commands write: people read text, programs read one JSON document per line."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from perdure.core.errors import PerdureError, StorageError

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def report_error(error: PerdureError) -> None:
    """One sentence on standard error: what, where, rule, way out; nobody need be there to read."""
    try:
        typer.echo(f"perdure: {error}", err=True)
    except BrokenPipeError:
        silence_unread()


def file_refusal(error: OSError) -> StorageError:
    """What a file that is read or drawn for people, outside the storage, was refused with."""
    from perdure.storage.refusals import refusal

    return refusal(
        "open, read or write", where=str(error.filename or "standard output"), error=error
    )


def silence(descriptor: int) -> None:
    """Put the null device in place of a standard stream that cannot be written.

    Else the interpreter's last flush of it fails, loudly and with an exit code of its own.
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def silence_unread() -> bool:
    """:func:`silence` the standard streams that are pipes without a reader; is there one?"""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    unread = [descriptor for descriptor, _ in poll.poll(0)]
    for descriptor in unread:
        silence(descriptor)
    return bool(unread)


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on one line; flushed, so that a pipe sees it at once."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()
