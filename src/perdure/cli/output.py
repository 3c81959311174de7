"""Where commands write: people read text, programs read one JSON document per line."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from perdure.core.errors import PerdureError, StorageError


@dataclass(slots=True)
class _Command:
    """What the errors of the command that is running are told with."""

    json: bool = False
    run_dir: Path | None = None


_COMMAND: ContextVar[_Command | None] = ContextVar("command", default=None)


def begin_command(*, json: bool) -> None:
    """Forget what the command before was about; this one was asked for JSON, or not."""
    _COMMAND.set(_Command(json))


def _command() -> _Command:
    return _COMMAND.get() or _Command()


def concerns(run_dir: Path | None) -> None:
    """From here on the errors of the command name this run; None: they name theirs themselves."""
    _command().run_dir = run_dir


def errors_are_json() -> bool:
    """Whether the command was asked for JSON."""
    return _command().json


def _remember_json(json: bool) -> bool:
    _command().json = json
    return json


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print JSON instead of text.", callback=_remember_json, is_eager=True
    ),
]


def report_error(error: PerdureError) -> None:
    """One sentence on standard error: what, where, rule, way out; nobody need be there to read.

    With ``--json`` the four parts and the exit code as one JSON object.
    """
    error = _with_run(error)
    text = f"perdure: {error}"
    if errors_are_json():
        parts = {"what": error.what, "where": error.where, "rule": error.rule}
        full = {**parts, "way_out": error.way_out, "code": error.exit_code}
        text = json.dumps({"error": full})
    try:
        typer.echo(text, err=True)
    except BrokenPipeError:
        silence_unread()


def _with_run(error: PerdureError) -> PerdureError:
    """The same error; where it happened begins with the run it concerns."""
    run_dir = _command().run_dir
    if run_dir is None or str(run_dir) in error.where or error.where == "command line":
        return error
    where = f"{run_dir}: {error.where}" if error.where else str(run_dir)
    return type(error)(error.what, where=where, rule=error.rule, way_out=error.way_out)


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
