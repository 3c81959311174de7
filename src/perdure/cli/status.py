"""``perdure status``: where a run stands, from its files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from perdure.cli.checkpoints import RunArgument
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run

if TYPE_CHECKING:
    from perdure.runtime.exposure import Exposure

STATUS_EXAMPLES = "Example: perdure status runs/tiny-1"
NO_TIER = "no remote tier: a crash or a loss of power costs nothing, the loss of this disk the run"


def status(run: RunArgument, *, json: JsonOption = False) -> None:
    """Say where a run stands: steps, groups, checkpoints, and what a lost disk would cost."""
    from perdure.core.clock import SystemClock
    from perdure.experience import read_experience
    from perdure.experience.claims import is_held
    from perdure.runtime.exposure import exposure

    storage = open_run(run)
    state, _ = read_experience(storage)
    held = is_held(storage)
    found = exposure(storage, state.checkpoints, now_wall_s=SystemClock().wall_s())
    groups = {kind.value: count for kind, count in state.counts.items() if count}
    newest = state.checkpoints[-1] if state.checkpoints else None
    incarnation = state.incarnations[-1].incarnation if state.incarnations else 0
    if json:
        fields = {"live": held, "incarnation": incarnation, "global_step": state.last_step}
        saved = {"checkpoint": newest.directory if newest else "", "groups": groups}
        remote = None if found is None else asdict(found)
        print_json({"run": str(run), **fields, **saved, "remote": remote})
        return
    life = "a live process holds it" if held else "no process holds it"
    typer.echo(f"{run}: {life}; incarnation {incarnation}, global step {state.last_step}")
    if groups:
        typer.echo("groups: " + ", ".join(f"{count:,} {name}" for name, count in groups.items()))
    typer.echo(f"checkpoint: {newest.directory if newest else 'none yet'}")
    for line in _remote_lines(found):
        typer.echo(line)


def _remote_lines(found: Exposure | None) -> list[str]:
    if found is None:
        return [NO_TIER]
    where = f"remote tier {found.address}".rstrip()
    lines = [f"{where}: holds {found.checkpoint or 'no checkpoint yet'}"]
    if found.behind_checkpoints:
        lines.append(f"  {found.behind_checkpoints} newer checkpoints are not there")
    if found.exposed_s is None:
        lines.append("  nothing of the log is there yet: the loss of this disk is that of the run")
    elif found.behind_log_bytes:
        lines.append(
            f"  {found.behind_log_bytes:,} bytes of the log are not there: the loss of this disk"
            f" costs the last {found.exposed_s:,.0f} s"
        )
    else:
        lines.append("  all of the log is there: the loss of this disk costs nothing of it")
    if found.trouble:
        lines.append(f"  shipping fails: {found.trouble}")
    return lines
