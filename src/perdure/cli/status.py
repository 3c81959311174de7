"""``perdure status``: where a run stands and why nothing moves, from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure.cli.checkpoints import RunArgument
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run

if TYPE_CHECKING:
    from perdure.core.storage_api import Storage
    from perdure.experience.state import ExperienceState
    from perdure.trainers.config import RunConfig
    from perdure.trainers.run_status import RunStatus

STATUS_EXAMPLES = "Examples: perdure status runs/tiny-1 · perdure status runs/tiny-1 --json"
_TOLD = (
    "step",
    "published",
    "checkpoint_committed",
    "warning",
    "warm_start_step",
    "run_started",
    "run_ended",
)
"""Events whose newest one is shown with its age."""


def status(run: RunArgument, *, json: JsonOption = False) -> None:
    """Say where a run stands, why nothing moves, and what a lost disk would cost."""
    from perdure.cli import status_lines
    from perdure.core.clock import SystemClock
    from perdure.experience import read_experience
    from perdure.experience.claims import claimant, is_held
    from perdure.runtime.exposure import exposure
    from perdure.trainers.run_status import reasons

    storage = open_run(run)
    state, _ = read_experience(storage)
    held, now_wall_s = is_held(storage), SystemClock().wall_s()
    incarnation = state.incarnations[-1].incarnation if state.incarnations else None
    holder = None if incarnation is None else claimant(storage, incarnation)
    told = _told(run, now_wall_s)
    found, checkpoint = _found(storage, run, state, told=told, now_wall_s=now_wall_s)
    remote = exposure(storage, state.checkpoints, now_wall_s=now_wall_s)
    why = list(reasons(found, held=held, run=str(run)))
    ages_s = {name: one.age_s for name, one in told.items()}
    if json:
        head = {"run": str(run), "live": held, "incarnation": incarnation or 0}
        newest = state.checkpoints[-1].directory if state.checkpoints else ""
        fields = {"global_step": found.last_step, "checkpoint": newest, "why": why}
        by = {"holder": None if holder is None else asdict(holder), "ages_s": ages_s}
        rest = {"remote": None if remote is None else asdict(remote)}
        facts = {**asdict(found), "complete": found.is_complete}
        process = {"process": facts.pop("live")}
        print_json({**head, **fields, **by, **facts, **process, **rest})
        return
    who = status_lines.life(found, held=held, holder=holder)
    typer.echo(f"{run}: {who}; incarnation {incarnation or 0}")
    lines = status_lines.lines(found, held=held, ages_s=ages_s, checkpoint=checkpoint)
    for line in [*lines, *status_lines.remote_lines(remote, script=found.script)]:
        typer.echo(line)
    if "warning" in told and (held or not found.is_complete):
        warning = told["warning"]
        message = warning.row.get("message", "")
        typer.echo(f"last warning ({status_lines.ago(warning.age_s)}): {message}")
    if not held and not found.is_complete and (reason := _why_ended(told)):
        typer.echo(f"ended: {reason}")
    for line in why:
        typer.echo(f"why: {line}")


@dataclass(frozen=True, slots=True)
class _Told:
    """An event, and how long ago it was."""

    row: Mapping[str, Any]
    age_s: float


def _told(run: Path, now_wall_s: float) -> dict[str, _Told]:
    """The newest event of each name that is shown."""
    from perdure.runtime.metrics_files import newest_events

    return {
        name: _Told(row, max(0.0, now_wall_s - float(row["wall_s"])))
        for name, row in newest_events(run, _TOLD).items()
    }


def _why_ended(told: Mapping[str, _Told]) -> str:
    """What the last process said when it ended before its training; empty if it was killed."""
    started, ended = told.get("run_started"), told.get("run_ended")
    if ended is None or (started is not None and started.age_s < ended.age_s):
        return ""
    return str(ended.row.get("reason", ""))


def _found(
    storage: Storage,
    run: Path,
    state: ExperienceState,
    *,
    told: dict[str, _Told],
    now_wall_s: float,
) -> tuple[RunStatus, str]:
    """Where it stands, and what is said of its newest checkpoint. Scripts write no events."""
    from perdure.core.errors import DamagedError
    from perdure.runtime.live_file import read_live
    from perdure.standalone.saved import saved_loop
    from perdure.trainers.run_status import run_status

    config, total = _config(storage, run), None
    checkpoint = state.checkpoints[-1].directory if state.checkpoints else "none yet"
    if config is None:
        try:
            saved = saved_loop(storage, state.checkpoints)
        except DamagedError as error:
            saved, checkpoint = None, f"{checkpoint}, which is damaged ({error.what})"
        if saved is not None:
            total, age_s = saved.total, max(0.0, now_wall_s - saved.saved_wall_s)
            told["checkpoint_committed"] = _Told({}, age_s)
    warm = told.get("warm_start_step")
    found = run_status(
        state,
        config=config,
        live=read_live(run),
        now_wall_s=now_wall_s,
        script_total=total,
        warm_step=0 if warm is None else int(warm.row.get("step", 0)),
    )
    return found, checkpoint


def _config(storage: Storage, run: Path) -> RunConfig | None:
    """The recipe; None for the run of a script."""
    from perdure.experience import read_run
    from perdure.trainers.recorded_config import recorded_config

    info = read_run(storage)
    return recorded_config(storage, run, info=info) if info.config_digest else None
