"""``perdure status``: where a run stands and why nothing moves, from its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from perdure.cli.checkpoints import RunArgument
from perdure.cli.output import JsonOption, print_json
from perdure.cli.runs import open_run

if TYPE_CHECKING:
    from perdure.core.storage_api import Storage
    from perdure.experience.claims import Claimant
    from perdure.runtime.exposure import Exposure
    from perdure.trainers.config import RunConfig
    from perdure.trainers.run_status import RunStatus

STATUS_EXAMPLES = "Examples: perdure status runs/tiny-1 · perdure status runs/tiny-1 --json"
NO_TIER = "no remote tier: a crash or a loss of power costs nothing, the loss of this disk the run"
_TOLD = ("step", "published", "checkpoint_committed", "warning")
"""Events whose newest one is shown with its age."""


def status(run: RunArgument, *, json: JsonOption = False) -> None:
    """Say where a run stands, why nothing moves, and what a lost disk would cost."""
    from perdure.core.clock import SystemClock
    from perdure.experience import read_experience
    from perdure.experience.claims import claimant, is_held
    from perdure.runtime.exposure import exposure
    from perdure.runtime.live_file import read_live
    from perdure.runtime.metrics_files import newest_events
    from perdure.trainers.run_status import reasons, run_status

    storage = open_run(run)
    state, _ = read_experience(storage)
    held, now_wall_s = is_held(storage), SystemClock().wall_s()
    incarnation = state.incarnations[-1].incarnation if state.incarnations else None
    holder = None if incarnation is None else claimant(storage, incarnation)
    found = run_status(
        state, config=_config(storage, run), live=read_live(run), now_wall_s=now_wall_s
    )
    told = newest_events(run, _TOLD)
    ages_s = {name: max(0.0, now_wall_s - float(row["wall_s"])) for name, row in told.items()}
    newest = state.checkpoints[-1].directory if state.checkpoints else ""
    remote = exposure(storage, state.checkpoints, now_wall_s=now_wall_s)
    why = list(reasons(found, held=held))
    if json:
        head = {"run": str(run), "live": held, "incarnation": incarnation or 0}
        fields = {"global_step": found.last_step, "checkpoint": newest, "why": why}
        by = {"holder": None if holder is None else asdict(holder), "ages_s": ages_s}
        rest = {"remote": None if remote is None else asdict(remote)}
        facts = asdict(found)
        process = {"process": facts.pop("live")}
        print_json({**head, **fields, **by, **facts, **process, **rest})
        return
    typer.echo(f"{run}: {_life(held, holder)}; incarnation {incarnation or 0}")
    lines = _lines(found, ages_s=ages_s, checkpoint=newest)
    for line in [*lines, *_remote_lines(remote)]:
        typer.echo(line)
    if "warning" in told:
        message = told["warning"].get("message", "")
        typer.echo(f"last warning ({_ago(ages_s.get('warning'))}): {message}")
    for line in why:
        typer.echo(f"why: {line}")


def _config(storage: Storage, run: Path) -> RunConfig | None:
    """The recipe; None for the run of a script."""
    from perdure.experience import read_run
    from perdure.trainers.recorded_config import recorded_config

    info = read_run(storage)
    return recorded_config(storage, run, info=info) if info.config_digest else None


def _life(held: bool, holder: Claimant | None) -> str:
    if not held:
        return "no process holds it"
    by = "" if holder is None else f" (process {holder.pid} on {holder.host})"
    return f"a live process holds it{by}"


def _lines(status: RunStatus, *, ages_s: Mapping[str, float], checkpoint: str) -> Iterator[str]:
    of = "" if status.total_steps is None else f" of {status.total_steps}"
    yield (
        f"global step {status.last_step}{of} done, {_ago(ages_s.get('step'))};"
        f" {status.updates_taken} batches taken since"
    )
    if status.groups:
        counts = ", ".join(f"{count:,} {name}" for name, count in status.groups.items())
        yield f"groups: {counts}; {status.frontier:,} prompts submitted"
    if status.evictions:
        counts = ", ".join(f"{name} {count:,}" for name, count in status.evictions.items())
        owed = f"; {status.owed} not yet replaced" if status.owed else ""
        yield f"evicted: {counts}{owed}"
    if status.oldest is not None:
        yield f"oldest in progress: {status.oldest}"
    if status.version_step is not None:
        behind = status.last_step - status.version_step
        late = f", {behind} steps behind" if behind else ", the newest there is"
        yield (
            f"published: version {status.version}, the weights of step {status.version_step}{late};"
            f" {_ago(ages_s.get('published'))}"
        )
    yield f"checkpoint: {checkpoint or 'none yet'}, {_ago(ages_s.get('checkpoint_committed'))}"
    yield from _live_lines(status)


def _live_lines(status: RunStatus) -> Iterator[str]:
    live = status.live
    if live is None:
        yield "process: has said nothing of itself"
        return
    awaited = live["awaited_groups"]
    waits = f", waiting for {awaited} finished groups" if awaited else ""
    yield (
        f"process: {live['activity']} for {live['activity_s']:.1f} s{waits}, "
        f"{live['running_sessions']} sessions, {live['generated_tokens']:,} tokens"
        f" ({'final word, ' if live.get('ended') else ''}said {_ago(status.live_age_s)})"
    )
    for engine in live["engines"]:
        silent = f", silent for {engine['silent_s']:.1f} s" if engine["in_flight"] else ""
        reason = f" ({engine['reason']})" if engine["reason"] else ""
        yield (
            f"  engine {engine['name']}: {engine['state']}, version {engine['version']},"
            f" {engine['in_flight']} in flight{silent}{reason}"
        )


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "at an unknown time"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.1f} s ago"


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
