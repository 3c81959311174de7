"""Finding runs and giving new ones a directory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.cli.output import concerns
from perdure.core.errors import ConfigError, NothingToResumeError, PerdureError

if TYPE_CHECKING:
    from perdure.core.storage_api import Storage

RUNS_DIR = Path("runs")
RUN_FILE = "run.json"
_FINISHED = "run_finished"
_NEIGHBOURS = 16
"""So many earlier runs are looked at, the newest ones."""


def open_run(run_dir: Path) -> Storage:
    """Storage of an existing run, for reading.

    Raises:
        NothingToResumeError: There is no run; names the nearest one.
        DamagedError: ``run.json`` is damaged, or missing from what is a run.
    """
    from perdure.experience import read_run
    from perdure.storage import PosixStorage

    concerns(run_dir)
    storage = PosixStorage(run_dir)
    try:
        if run_dir.exists() and not run_dir.is_dir():
            raise NothingToResumeError("a file")
        read_run(storage)
    except NothingToResumeError as error:
        raise NothingToResumeError(
            "no run here",
            where=str(run_dir),
            rule=f"a run directory holds {RUN_FILE}",
            way_out=_way_out(run_dir),
        ) from error
    return storage


def chosen_run_dir(name: str) -> Path:
    """The directory of ``--run``.

    Raises:
        ConfigError: The name is empty.
    """
    if not name.strip():
        raise ConfigError(
            "--run is empty",
            where="command line",
            rule="a run has a directory of its own",
            way_out="name a new directory, for example --run runs/mine, or leave --run out",
        )
    return Path(name)


def new_run_dir(stem: str, parent: Path = RUNS_DIR) -> Path:
    """The first free ``runs/<stem>-<n>``. Starting the run claims it; this only proposes."""
    return parent / f"{stem}-{len(_earlier(stem, parent)) + 1}"


def unfinished_run(stem: str, *, config_digest: str, parent: Path = RUNS_DIR) -> Path | None:
    """The newest earlier ``runs/<stem>-<n>`` of this configuration that waits to be resumed.

    It is one without the event of its end that no process holds. A neighbour that cannot be read
    is nobody's concern here: what is wrong with it is said when it is asked for.
    """
    from perdure.experience import read_run
    from perdure.experience.claims import is_held
    from perdure.runtime.metrics_files import newest_events
    from perdure.storage import PosixStorage

    for run_dir in reversed(_earlier(stem, parent)[-_NEIGHBOURS:]):
        storage = PosixStorage(run_dir)
        with suppress(PerdureError, OSError):
            is_same = read_run(storage).config_digest == config_digest
            if is_same and not newest_events(run_dir, (_FINISHED,)) and not is_held(storage):
                return run_dir
    return None


def _earlier(stem: str, parent: Path) -> list[Path]:
    taken: list[Path] = []
    while (run_dir := parent / f"{stem}-{len(taken) + 1}").exists():
        taken.append(run_dir)
    return taken


def _way_out(run_dir: Path) -> str:
    from perdure.config import nearest

    folders = dict.fromkeys((run_dir.parent, RUNS_DIR))
    runs = [f.parent for folder in folders for f in sorted(folder.glob(f"*/{RUN_FILE}"))]
    # Names alone: the folder that all of them share makes any two paths look alike.
    close = nearest(run_dir.name, [one.name for one in runs])
    soon = "one that was just started is here in a moment"
    if close is not None:
        found = next(one for one in runs if one.name == close)
        return f"did you mean {str(found)!r}? ({soon})"
    if runs:
        return f"use one of: {', '.join(map(str, runs))} ({soon})"
    return (
        "start one with `perdure train RECIPE`; one that was shipped comes back with"
        f" `perdure ckpt pull URL {run_dir}`"
    )
