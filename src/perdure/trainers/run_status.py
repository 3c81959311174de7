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

STALE_S = 60.0
"""A live file that was not refreshed for so long is called old: an update may take a while."""
_WELL = ("serving", "paused")
_ASLEEP = "asleep"
_NO_WEIGHTS = "no weights yet"
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
        last_step: The last step that is done; of a script, the last one that is saved.
        updates_taken: Local updates of the step in progress whose batch is taken.
        groups: Groups in each state that has any.
        frontier: Prompts submitted so far.
        oldest: The open group submitted first.
        blocked_by: Groups that hold back sampling.
        evictions: By reason.
        owed: Evictions that no prompt has replaced yet.
        version: Newest published policy version; ``version_step`` is the step it was made by.
        unchanged: The newest published weights are those of the last step, whenever it was.
        mismatch: Alarm of the last step, if any.
        live: What the newest process said, ``live_age_s`` ago; None if it said nothing.
        stale: It should have said something since.
        script: The run of a script with a loop of its own.
        warm_step: Steps of the warm start that are done, as far as is known, of ``warm_steps``.
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
    unchanged: bool
    mismatch: str | None
    live: Mapping[str, Any] | None
    live_age_s: float | None
    stale: bool
    script: bool
    warm_step: int
    warm_steps: int

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
    script_total: int | None = None,
    warm_step: int = 0,
) -> RunStatus:
    """Put it together.

    Args:
        config: None for the run of a script, which has no limits.
        live: What :func:`read_live` found.
        script_total: Steps of the script, as far as its newest checkpoint says.
        warm_step: The newest step of the warm start that there is an event of.
    """
    total = script_total if config is None else config.trainer.total_steps
    last_step = state.last_step
    if config is None and state.checkpoints:
        last_step = GlobalStep(state.checkpoints[-1].step)
    over = total is not None and last_step >= total
    step = GlobalStep(last_step if over else last_step + 1)
    newest = state.incarnations[-1].incarnation if state.incarnations else 0
    if live is not None and live.get("incarnation", newest) != newest:
        live = None
    rules = None if config is None else sampling_rules(config)
    blocked_by = decide(state, global_step=step, rules=rules).blocked_by
    oldest = next((group.submitted.group for group in state.table.open()), None)
    published = state.published.get(state.newest_version)
    done = state.step_done.get(state.last_step)
    threshold = None if config is None else config.learner.mismatch_alarm
    age_s = None if live is None else max(0.0, now_wall_s - float(live["wall_s"]))
    warm_steps = 0 if config is None else config.learner.supervised.steps
    logged = max((s for phase, s in state.phase_steps if phase == "warm_start"), default=0)
    return RunStatus(
        total_steps=total,
        step=step,
        last_step=last_step,
        updates_taken=0 if over else len(state.updates_of(step)),
        groups={kind.value: state.counts[kind] for kind in GroupState if state.counts[kind]},
        frontier=state.table.next_data_index,
        oldest=None if oldest is None else _report(state, oldest, step, live),
        blocked_by=tuple(_report(state, group, step, live) for group in blocked_by),
        evictions={reason.value: count for reason, count in state.table.evictions.most_common()},
        owed=len(state.table.owed),
        version=state.newest_version,
        version_step=None if published is None else published.global_step,
        unchanged=done is not None and state.version_of(done.policy_digest) == state.newest_version,
        mismatch=done and mismatch_problem(done.metrics, threshold=threshold),
        live=live,
        live_age_s=age_s,
        stale=age_s is not None and age_s > STALE_S,
        script=config is None,
        warm_step=max(logged, warm_step),
        warm_steps=warm_steps,
    )


def reasons(status: RunStatus, *, held: bool, run: str) -> Iterator[str]:
    """Why nothing moves, the most likely reason first; empty if nothing speaks against it.

    Args:
        held: A live process holds the run.
        run: Its directory.
    """
    if status.is_complete:
        return
    if not held:
        way = "start the script again" if status.script else f"go on with `perdure resume {run}`"
        yield f"no process works on it; {way}"
        return
    if status.stale:
        activity = str((status.live or {}).get("activity", ""))
        yield (
            f"the process has said nothing for {status.live_age_s:.0f} s; its last word was"
            f" '{activity}': it computes without a pause, or hangs"
        )
    live = status.live or {}
    for engine in live.get("engines", ()):
        yield from _engine_reasons(engine, status)
    for group in status.blocked_by:
        yield f"{group} holds back sampling (sampler.age_policy is wait)"
    awaited, finished = live.get("awaited_groups", 0), status.groups.get("finished", 0)
    if awaited > finished and not status.blocked_by:
        oldest = f"; the oldest in progress is {status.oldest}" if status.oldest else ""
        yield f"the loop waits for {awaited} finished groups, {finished} are there{oldest}"
    if status.mismatch:
        yield f"mismatch: {status.mismatch}"


def _engine_reasons(engine: Mapping[str, Any], status: RunStatus) -> Iterator[str]:
    # Asleep while the learner has the devices, and empty before the first publication: as planned.
    planned = (_ASLEEP,) if status.version else (_ASLEEP, _NO_WEIGHTS)
    if engine["state"] == "quarantined" and engine["reason"] in planned:
        return
    if engine["state"] not in _WELL:
        yield f"engine {engine['name']} is {engine['state']}: {engine['reason']}"
    elif engine["in_flight"] and engine["silent_s"] >= _SILENT_S:
        yield (
            f"engine {engine['name']} has {engine['in_flight']} requests and has been silent"
            f" for {engine['silent_s']:.0f} s"
        )


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
