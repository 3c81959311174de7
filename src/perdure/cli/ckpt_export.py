"""``perdure ckpt export``: the parts of a checkpoint as plain files."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.checkpoints import read_checkpoint
from perdure.cli.output import JsonOption, print_json
from perdure.core.errors import ConfigError
from perdure.core.names import hint

if TYPE_CHECKING:
    from perdure.checkpoint import CheckpointReader
    from perdure.core.storage_api import Storage

EXPORT_EXAMPLES = (
    "Examples:\n\nperdure ckpt export runs/tiny-1 exports/all\n\n"
    "perdure ckpt export runs/tiny-1:step-00000080-1 exports/policy --component policy"
)


def export_checkpoint(
    address: Annotated[
        str, typer.Argument(metavar="RUN[:CHECKPOINT]", help="The newest one by default.")
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="New or empty directory for the files.")
    ],
    *,
    component: Annotated[
        list[str] | None,
        typer.Option("--component", metavar="NAME", help="One of them; may be repeated."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write NAME.safetensors and NAME.json of every component, checked on the way.

    Any safetensors reader opens the tensors. Rows of segments and pickles stay in the run.
    """
    from perdure.storage import PosixStorage

    checkpoint, reader = read_checkpoint(address)
    names = _chosen(reader, component)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            "is not an empty directory",
            where=str(directory),
            rule="nothing is written over other files",
            way_out="name a new one",
        )
    files = _write(PosixStorage(directory), reader, names)
    left_out = [
        name
        for name in names
        if name in reader.manifest.segments or reader.manifest.components[name].legacy_file
    ]
    if json:
        fields = {"directory": str(directory), "files": files, "left_out": left_out}
        print_json({"address": address, "checkpoint": checkpoint, **fields})
        return
    for file in files:
        typer.echo(str(directory / file))
    for name in left_out:
        typer.echo(f"{name}: rows of segments and pickles stay in the run")


def _chosen(reader: CheckpointReader, asked: list[str] | None) -> list[str]:
    known = reader.manifest.components
    for name in asked or ():
        if name not in known:
            raise ConfigError(
                f"no component {name!r}",
                where="--component",
                rule=f"one of {', '.join(known)}",
                way_out=hint(name, known),
            )
    return asked or sorted(known)


def _write(storage: Storage, reader: CheckpointReader, names: list[str]) -> list[str]:
    values = reader.values()
    written: list[str] = []
    for name in dict.fromkeys(names):
        folder = name.rpartition("/")[0]
        storage.make_dirs(folder)
        if reader.stored_tensors(name):
            written.append(f"{name}.safetensors")
            _write_file(storage, written[-1], reader.tensor_file(name))
        if values.get(name):
            written.append(f"{name}.json")
            text = json_text.dumps(values[name], indent=1, default=_as_hex) + "\n"
            _write_file(storage, written[-1], [memoryview(text.encode())])
    return written


def _write_file(storage: Storage, path: str, pieces: Iterable[memoryview]) -> None:
    file = storage.create_append(path)
    try:
        for piece in pieces:
            file.append([piece])
        file.sync()
    finally:
        file.close()


def _as_hex(value: object) -> object:
    """Bytes, which JSON has not."""
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    raise TypeError(f"{type(value).__name__} has no JSON")
