"""The committed checkpoints of a run, and finding one of them by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.runs import open_run
from perdure.core.errors import NothingToResumeError

if TYPE_CHECKING:
    from perdure.checkpoint import CheckpointReader, Quarantined, VerifyReport
    from perdure.core.records import Checkpointed
    from perdure.core.storage_api import Storage

_SHOWN = 8
"""So many names are listed at most, the newest."""
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]


def committed_checkpoints(storage: Storage) -> list[Checkpointed]:
    """Commits of the kept lineage, oldest first."""
    from perdure.experience import read_experience

    state, _ = read_experience(storage)
    return list(state.checkpoints)


def set_aside(storage: Storage, reports: Sequence[VerifyReport]) -> dict[str, Quarantined]:
    """Those of the damaged ones that recovery has put into quarantine, by directory."""
    from perdure.checkpoint import quarantined

    bad = [report.directory for report in reports if not report.ok]
    found = {name: quarantined(storage, name) for name in bad}
    return {name: aside for name, aside in found.items() if aside is not None}


def describe(aside: Quarantined) -> str:
    """What a table says of one."""
    return f"quarantined ({aside.reason}), see {aside.path}"


def newest(records: Sequence[Checkpointed], run: Path) -> Checkpointed:
    """The last one. Raises ``NothingToResumeError`` if there is none."""
    if not records:
        raise NothingToResumeError(
            "no checkpoint was committed yet", where=str(run), way_out="let the run go on"
        )
    return records[-1]


def find_checkpoint(records: Sequence[Checkpointed], name: str | None, run: Path) -> Checkpointed:
    """The commit of the checkpoint called ``name``; None: the newest.

    Raises:
        NothingToResumeError: There is none; names the nearest.
    """
    from perdure.config import nearest

    last = newest(records, run)
    by_name = {record.directory: record for record in records}
    if name is None:
        return last
    if name not in by_name:
        close = nearest(name, by_name)
        some = ", ".join(list(by_name)[-_SHOWN:])
        raise NothingToResumeError(
            f"no checkpoint {name!r}",
            where=str(run),
            rule="committed checkpoints are listed by `perdure ckpt list`",
            way_out=f"did you mean {close!r}?" if close else f"name one of: {some}",
        )
    return by_name[name]


def address_of(run: Path, checkpoint: str | None) -> tuple[Path, str | None]:
    """A run and a checkpoint that are given as two arguments, or as ``RUN:CHECKPOINT``."""
    return parse_address(str(run)) if checkpoint is None else (run, checkpoint)


def parse_address(address: str) -> tuple[Path, str | None]:
    """``RUN`` or ``RUN:CHECKPOINT``; a run whose name has a colon may be given as it is."""
    run, colon, checkpoint = address.rpartition(":")
    if not colon or Path(address).is_dir() or not Path(run).is_dir():
        return Path(address), None
    return Path(run), checkpoint


def read_checkpoint(address: str) -> tuple[str, CheckpointReader]:
    """Name and contents of the checkpoint at ``RUN[:CHECKPOINT]``, the newest by default.

    Raises:
        NothingToResumeError: There is no such run or checkpoint.
        DamagedError: Its manifest is not the committed one.
    """
    from perdure.checkpoint import CheckpointReader, committed_manifest

    run, name = parse_address(address)
    storage = open_run(run)
    records = committed_checkpoints(storage)
    record = find_checkpoint(records, name, run)
    return record.directory, CheckpointReader(storage, committed_manifest(storage, record))
