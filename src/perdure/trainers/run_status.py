"""Where a run stands and why nothing moves, from its files: works on live and dead runs alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.core.ids import GlobalStep, GroupId
from perdure.experience import decide
from perdure.experience.age_policy import prompt_age
from perdure.experience.lifecycle import GroupState
from perdure.experience.state import ExperienceState
from perdure.trainers.config import RunConfig
from perdure.trainers.mismatch_watch import mismatch_problem
from perdure.trainers.sampling_rules import sampling_rules

STALE_REFRESHES = 5
"""A live file that missed so many refreshes is called old."""
_WELL = ("serving", "paused")
_SILENT_S = 5.0
"""An engine with requests that gives no token for so long is named."""


@dataclass(frozen=True, slots=True)
class OpenGroupReport:
    """A group that is not terminal.

    Attributes:
        age: In global steps, as of the step in progress.
        missing: Sessions without a reward.
        doing: What its running sessions do, as far as the process says.
    """

    group: int
    state: str
    age: int
    missing: int
    doing: tuple[str, ...] = ()

    def __str__(self) -> str:
        doing = f": {'; '.join(self.doing)}" if self.doing else ""
        return (
            f"group {self.group} ({self.state}, age {self.age}, {self.missing} sessions"
            f" missing{doing})"
        )


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What the log and the live file say.

    Attributes:
        step: The global step in progress, or the last one if the run is over.
        updates_taken: Local updates of the step in progress whose batch is taken.
        groups: Groups in each state that has any.
        frontier: Prompts submitted so far.
        oldest: The open group submitted first.
        blocked_by: Groups that hold back sampling.
        evictions: By reason.
        owed: Evictions that no prompt has replaced yet.
        version: Newest published policy version; ``version_step`` is the step it was made by.
        mismatch: Alarm of the last step, if any.
        live: What the process said, ``live_age_s`` ago; None if it said nothing.
        stale: It should have said something since.
    """

    total_steps: int | None
    step: int
    last_step: int
    updates_taken: int
    groups: Mapping[str, int]
    frontier: int
    oldest: OpenGroupReport | None
    blocked_by: tuple[OpenGroupReport, ...]
    evictions: Mapping[str, int]
    owed: int
    version: int
    version_step: int | None
    mismatch: str | None
    live: Mapping[str, Any] | None
    live_age_s: float | None
    stale: bool

    @property
    def is_complete(self) -> bool:
        """Whether every step is done."""
        return self.total_steps is not None and self.last_step >= self.total_steps


def run_status(
    state: ExperienceState,
    *,
    config: RunConfig | None,
    live: Mapping[str, Any] | None,
    now_wall_s: float,
) -> RunStatus:
    """Put it together.

    Args:
        config: None for the run of a script, which has neither total nor limits.
        live: What :func:`read_live` found.
    """
    step = GlobalStep(state.last_step + 1)
    total = None if config is None else config.trainer.total_steps
    if total is not None:
        step = GlobalStep(min(step, total))
    rules = None if config is None else sampling_rules(config)
    blocked_by = decide(state, global_step=step, rules=rules).blocked_by
    oldest = next((group.submitted.group for group in state.table.open()), None)
    published = state.published.get(state.newest_version)
    done = state.step_done.get(state.last_step)
    threshold = None if config is None else config.learner.mismatch_alarm
    age_s = None if live is None else max(0.0, now_wall_s - float(live["wall_s"]))
    every_s = 0.0 if live is None else float(live.get("every_s", 0.0))
    return RunStatus(
        total_steps=total,
        step=step,
        last_step=state.last_step,
        updates_taken=len(state.updates_of(step)),
        groups={kind.value: state.counts[kind] for kind in GroupState if state.counts[kind]},
        frontier=state.table.next_data_index,
        oldest=None if oldest is None else _report(state, oldest, step, live),
        blocked_by=tuple(_report(state, group, step, live) for group in blocked_by),
        evictions={reason.value: count for reason, count in state.table.evictions.most_common()},
        owed=len(state.table.owed),
        version=state.newest_version,
        version_step=None if published is None else published.global_step,
        mismatch=done and mismatch_problem(done.metrics, threshold=threshold),
        live=live,
        live_age_s=age_s,
        stale=age_s is not None and age_s > STALE_REFRESHES * every_s,
    )


def reasons(status: RunStatus, *, held: bool) -> Iterator[str]:
    """Why nothing moves, the most likely reason first; empty if nothing speaks against it.

    Args:
        held: A live process holds the run.
    """
    if status.is_complete:
        return
    if not held:
        yield "no process works on it; go on with `perdure resume`"
        return
    if status.stale:
        activity = str((status.live or {}).get("activity", ""))
        yield (
            f"the process has said nothing for {status.live_age_s:.0f} s; its last word was"
            f" '{activity}': it computes without a pause, or hangs"
        )
    live = status.live or {}
    for engine in live.get("engines", ()):
        if engine["state"] not in _WELL:
            yield f"engine {engine['name']} is {engine['state']}: {engine['reason']}"
        elif engine["in_flight"] and engine["silent_s"] >= _SILENT_S:
            yield (
                f"engine {engine['name']} has {engine['in_flight']} requests and has been silent"
                f" for {engine['silent_s']:.0f} s"
            )
    for group in status.blocked_by:
        yield f"{group} holds back sampling (sampler.age_policy is wait)"
    awaited, finished = live.get("awaited_groups", 0), status.groups.get("finished", 0)
    if awaited > finished and not status.blocked_by:
        oldest = f"; the oldest in progress is {status.oldest}" if status.oldest else ""
        yield f"the loop waits for {awaited} finished groups, {finished} are there{oldest}"
    if status.mismatch:
        yield f"mismatch: {status.mismatch}"


def _report(
    state: ExperienceState, number: GroupId, step: GlobalStep, live: Mapping[str, Any] | None
) -> OpenGroupReport:
    group = state.groups[number]
    shown = [one for one in (live or {}).get("silent_sessions", ()) if one["group"] == number]
    doing = tuple(
        f"session {one['session']} is {one['doing']}, {one['tokens']} tokens, silent for"
        f" {one['silent_s']:.0f} s"
        for one in shown
    )
    age = prompt_age(group.submitted, step)
    return OpenGroupReport(int(number), group.state.value, age, len(group.missing), doing)
