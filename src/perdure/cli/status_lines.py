"""The lines of ``perdure status`` for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.experience.claims import Claimant
    from perdure.runtime.exposure import Exposure
    from perdure.trainers.run_status import RunStatus


def life(status: RunStatus, *, held: bool, holder: Claimant | None) -> str:
    """Who works on the run."""
    if held:
        by = "" if holder is None else f" (process {holder.pid} on {holder.host})"
        return f"a live process holds it{by}"
    return "finished" if status.is_complete else "no process holds it"


def lines(
    status: RunStatus, *, held: bool, ages_s: Mapping[str, float], checkpoint: str
) -> Iterator[str]:
    """Where the run stands, most important first."""
    yield _progress(status, ages_s)
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
        yield (
            f"published: version {status.version}, the weights of step {status.version_step}"
            f"{_behind(status)}{_when(ages_s, 'published')}"
        )
    yield f"checkpoint: {checkpoint}{_when(ages_s, 'checkpoint_committed')}"
    if not status.script:
        yield from _process(status, held=held)


def _progress(status: RunStatus, ages_s: Mapping[str, float]) -> str:
    of = "" if status.total_steps is None else f" of {status.total_steps}"
    if status.script:
        later = "" if status.is_complete else "; steps since are known to the script only"
        return f"step {status.last_step}{of} saved{later}"
    if status.warm_steps and not status.last_step:
        done = min(status.warm_step, status.warm_steps)
        when = _when(ages_s, "warm_start_step") if done else ""
        if done < status.warm_steps:
            after = f"; no global step{of} yet"
            return f"warm start: step {done} of {status.warm_steps} done{when}{after}"
    taken = status.updates_taken
    batches = f"; {taken} {'batch' if taken == 1 else 'batches'} taken since" if taken else ""
    return f"global step {status.last_step}{of} done{_when(ages_s, 'step')}{batches}"


def _behind(status: RunStatus) -> str:
    behind = status.last_step - (status.version_step or 0)
    if not behind:
        return ", the newest there is"
    if status.unchanged:
        return f", which have not changed in the {_steps(behind)} since"
    return f", {_steps(behind)} behind"


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _process(status: RunStatus, *, held: bool) -> Iterator[str]:
    live = status.live
    if live is None:
        yield f"process: has said nothing of itself{' yet' if held else ''}"
        return
    said = ago(status.live_age_s or 0.0)
    if not held:
        if live.get("ended"):
            yield f"process: ended {said}"
        else:
            yield f"process: gone; its last word {said}: {live['activity']}"
        return
    awaited = live["awaited_groups"]
    waits = f", waiting for {awaited} finished groups" if awaited else ""
    running = live["running_sessions"]
    yield (
        f"process: {live['activity']} for {live['activity_s']:.1f} s{waits}, "
        f"{running} session{'' if running == 1 else 's'}, {live['generated_tokens']:,} tokens"
        f" ({'final word, ' if live.get('ended') else ''}said {said})"
    )
    for engine in live["engines"]:
        silent = f", silent for {engine['silent_s']:.1f} s" if engine["in_flight"] else ""
        # A colocated engine sleeps while the learner trains: nothing is wrong with it.
        sleeps = (engine["state"], engine["reason"]) == ("quarantined", "asleep")
        state = "asleep" if sleeps else engine["state"]
        reason = f" ({engine['reason']})" if engine["reason"] and not sleeps else ""
        yield (
            f"  engine {engine['name']}: {state}, version {engine['version']},"
            f" {engine['in_flight']} in flight{silent}{reason}"
        )


def _when(ages_s: Mapping[str, float], event: str) -> str:
    return f", {ago(ages_s[event])}" if event in ages_s else ""


def ago(seconds: float) -> str:
    """An age for people."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.1f} s ago"


def remote_lines(found: Exposure | None, *, script: bool) -> list[str]:
    """What a crash and a lost disk would cost."""
    if found is None:
        crash = "the steps since the last save" if script else "nothing"
        disk = "the loss of this disk the run"
        return [f"no remote tier: a crash or a loss of power costs {crash}, {disk}"]
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
