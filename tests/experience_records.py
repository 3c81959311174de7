"""Records of small histories, and one comparable value of a folded state, for experience tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from perdure.core.experience_records import (
    GroupSettled,
    Partials,
    SessionRestarted,
    SessionsDone,
    Submitted,
    ToolResult,
)
from perdure.core.ids import (
    GlobalStep,
    GroupId,
    IncarnationNumber,
    LocalUpdate,
    LogPosition,
    OptimizerStep,
    PayloadRef,
    PolicyVersion,
    SessionId,
    UpdateId,
)
from perdure.core.record_types import EvictionReason, GroupOutcome, StopReason
from perdure.core.records import (
    Checkpointed,
    ControlRecord,
    Evicted,
    Published,
    Refilled,
    StepDone,
    Taken,
)
from perdure.core.trajectories import PartialDelta, Segment, Trajectory
from perdure.experience.entries import Entry
from perdure.experience.prompt_group import SettledSession
from perdure.experience.state import ExperienceState
from perdure.experience.unfinished import Unfinished

REF = PayloadRef(IncarnationNumber(1), 0, 64, 64, 7)


def at(offset: int, incarnation: int = 1) -> LogPosition:
    return LogPosition(IncarnationNumber(incarnation), 0, offset)


def submitted(group: int, *, step: int = 1, sessions: int = 2) -> Submitted:
    return Submitted(
        group=GroupId(group),
        submitted_step=GlobalStep(step),
        sessions=sessions,
        prompt_ids=(1, 2, group),
        task="sort",
        answer=str(group),
        dataset_digest="d",
        data_index=group,
    )


def session_done(group: int, index: int, *, reward: float = 1.0, version: int = 0) -> SessionsDone:
    return sessions_done([(group, index)], reward=reward, version=version)


def sessions_done(
    sessions: Iterable[tuple[int, int]], *, reward: float = 1.0, version: int = 0
) -> SessionsDone:
    ids = tuple(SessionId(GroupId(group), index) for group, index in sessions)
    rows = len(ids)
    return SessionsDone(
        sessions=ids,
        rewards=(reward,) * rows,
        stop_reasons=(StopReason.STOP,) * rows,
        tokens=(3,) * rows,
        first_versions=(PolicyVersion(version),) * rows,
        last_versions=(PolicyVersion(version),) * rows,
        parts=({},) * rows,
        payload=REF,
    )


def settled(group: int, outcome: GroupOutcome = GroupOutcome.FINISHED) -> GroupSettled:
    return GroupSettled(
        GroupId(group), outcome, "" if outcome is GroupOutcome.FINISHED else "broke"
    )


def finished_group(
    group: int, *, step: int = 1, rewards: Iterable[float] = (0.0, 1.0)
) -> list[ControlRecord]:
    rewards = list(rewards)
    done = [session_done(group, i, reward=reward) for i, reward in enumerate(rewards)]
    return [submitted(group, step=step, sessions=len(rewards)), *done, settled(group)]


def update_id(step: int, local: int = 0) -> UpdateId:
    return UpdateId(GlobalStep(step), LocalUpdate(local))


def taken(step: int, groups: Iterable[int], local: int = 0) -> Taken:
    return Taken(update_id(step, local), tuple(groups), "config")


def step_done(step: int, digest: str = "") -> StepDone:
    text = digest or f"digest-{step}"
    return StepDone(GlobalStep(step), text, f"policy-{text}", OptimizerStep(step), {}, {})


def evicted(group: int, reason: EvictionReason = EvictionReason.AGE, step: int = 1) -> Evicted:
    return Evicted(GroupId(group), reason, GlobalStep(step))


def refilled(group: int, replaces: int) -> Refilled:
    return Refilled(GroupId(group), GroupId(replaces))


def checkpointed(step: int, position: LogPosition, phase: str = "train") -> Checkpointed:
    prefix = "step" if phase == "train" else "warm"
    return Checkpointed(f"{prefix}-{step:08d}-1", phase, step, f"manifest-{step}", position)


def published(version: int, step: int = 0) -> Published:
    return Published(PolicyVersion(version), f"weights-{version}", GlobalStep(step))


def placed(records: Iterable[ControlRecord], *, start: int = 0) -> list[Any]:
    """The records with made-up places, 64 bytes each."""
    return [(at(start + 64 * (i + 1)), record) for i, record in enumerate(records)]


def trajectory(group: int, index: int, *, version: int = 0, length: int = 4) -> Trajectory:
    """A trajectory whose numbers name its session."""
    tokens = np.arange(length, dtype=np.int32) + 100 * group + 10 * index
    return Trajectory(
        session=SessionId(GroupId(group), index),
        prompt_ids_P=np.array([1, 2, group], dtype=np.int32),
        response_ids_T=tokens,
        logprobs_T=-0.25 * np.ones(length, dtype=np.float32),
        loss_mask_T=np.ones(length, dtype=np.uint8),
        segments=(Segment(PolicyVersion(version), 0, length),),
        stop_reason=StopReason.STOP,
    )


def partials(
    rows: Iterable[tuple[int, int, int, int]], *, attempt: int = 0, version: int = 0
) -> Partials:
    """Rows of ``(group, index, start, end)``."""
    some = list(rows)
    return Partials(
        sessions=tuple(SessionId(GroupId(group), index) for group, index, _, _ in some),
        attempts=(attempt,) * len(some),
        starts=tuple(start for _, _, start, _ in some),
        ends=tuple(end for _, _, _, end in some),
        first_versions=(PolicyVersion(version),) * len(some),
        last_versions=(PolicyVersion(version),) * len(some),
        payload=REF,
    )


def tool_result(
    group: int, index: int, *, turn: int = 0, call: int = 0, attempt: int = 0, result: str = "4"
) -> ToolResult:
    return ToolResult(SessionId(GroupId(group), index), attempt, turn, call, "calc", result)


def restarted(group: int, index: int, *, attempt: int = 1) -> SessionRestarted:
    return SessionRestarted(SessionId(GroupId(group), index), attempt, "start again")


def delta(
    group: int, index: int, start: int, end: int, *, attempt: int = 0, version: int = 0
) -> PartialDelta:
    """A piece whose numbers name its session, its attempt and its place."""
    return PartialDelta(
        session=SessionId(GroupId(group), index),
        start=start,
        token_ids_N=np.arange(start, end, dtype=np.int32) + 1000 * group + 100 * index,
        logprobs_N=-np.arange(start, end, dtype=np.float32) / 8 - attempt,
        loss_mask_N=np.ones(end - start, dtype=np.uint8),
        segments=(Segment(PolicyVersion(version), start, end),) if start < end else (),
        attempt=attempt,
    )


def placed_entry(place: LogPosition, record: ControlRecord) -> Entry:
    """A record as a writer leaves it behind: it knows where it came to lie."""
    ref = record.payload if isinstance(record, SessionsDone | Partials) else None
    return Entry(record, ref=ref, position=place)


def settled_row(settled: SettledSession) -> tuple[Any, ...]:
    """What the log says of a session, and where its tokens lie."""
    record, row = settled.batch.record, settled.row
    columns = [getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "payload"]
    batch = settled.batch
    return (batch.payload, batch.first_row + row, *(column[row] for column in columns))


def unfinished_value(unfinished: Unfinished) -> tuple[Any, ...]:
    parts = [(part.batch.payload, part.row, part.start, part.end) for part in unfinished.parts]
    return (unfinished.attempt, unfinished.tokens, parts, dict(unfinished.results))


def comparable(state: ExperienceState, *, places: bool = True) -> dict[str, Any]:
    """All that a state says, as plain values; ``places`` includes positions in the log."""
    table = state.table
    value: dict[str, Any] = {
        "groups": {
            g: (
                v.submitted,
                v.state,
                {i: settled_row(s) for i, s in v.done.items()},
                v.reason,
                v.uniform,
                {i: unfinished_value(u) for i, u in v.unfinished.items()},
            )
            for g, v in table.live.items()
        },
        "retired": dict(table.retired),
        "counts": {s: n for s, n in table.counts.items() if n},
        "evictions": dict(table.evictions),
        "owed": dict(table.owed),
        "refills": set(table.refills),
        "next": (table.next_group, table.next_data_index, state.next_update, state.next_version),
        "finished": list(table.finished),
        "failed": sorted(g.submitted.group for g in table.failed()),
        "open": [g.submitted.group for g in table.open()],
        "taken": list(state.taken.items()),
        "step_done": dict(state.step_done),
        "redone": dict(state.redone),
        "published": dict(state.published),
        "evaluated": dict(state.evaluated),
        "checkpoints": list(state.checkpoints),
        "collected": list(state.collected),
        "phase_steps": dict(state.phase_steps),
        "failures": dict(state.update_failures),
    }
    if places:
        value["position"] = state.position
    return value
