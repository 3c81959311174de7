"""Experience that an earlier incarnation left and that cannot be trained on."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from perdure.core.experience_records import GroupSettled, SessionRestarted
from perdure.core.ids import GlobalStep, GroupId, PolicyVersion
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.core.records import ControlRecord, Evicted
from perdure.runtime.acknowledge import acknowledged
from perdure.trainers.context import TrainContext

POISON_FAILURES = 2
"""A batch whose training raised this often is set aside."""


async def set_poison_aside(ctx: TrainContext) -> None:
    """Evict the groups of batches whose training raised twice, and say so."""
    state = ctx.store.state
    for update, failures in sorted(state.update_failures.items()):
        unfinished = update.global_step > state.last_step
        if failures < POISON_FAILURES or not unfinished or state.is_poisoned(update):
            continue
        groups = [GroupId(group) for group in state.taken[update].groups]
        evictions = [(group, EvictionReason.POISON) for group in groups]
        await acknowledged(ctx.store, ctx.store.evict(evictions, global_step=update.global_step))
        message = f"batch {update.key()} raised {failures} times; its groups are set aside"
        ctx.events("warning", {"message": message})


async def drop_abandoned(ctx: TrainContext) -> None:
    """Let go what weights have generated that training cannot make good use of.

    On-policy training takes sessions of the present weights alone. The asynchronous modes take
    older ones too, but those of a branch that a rewind has left only under importance correction.
    Groups with such sessions are evicted; those that are still open fail first, since one in the
    middle of its sessions cannot be evicted. Unfinished sessions start again.
    """
    state = ctx.store.state
    useful = _useful_versions(ctx, state.version_of(await ctx.runtime.policy_digest()))
    if useful is None:
        return

    def is_abandoned(group: GroupId) -> bool:
        done = state.groups[group].done.values()
        return any(not {d.first_version, d.last_version} <= useful for d in done)

    begun = [g.submitted.group for g in state.table.open() if is_abandoned(g.submitted.group)]
    finished = [group for group in state.table.finished if is_abandoned(group)]
    why = "the weights of its sessions no longer exist"
    records: list[ControlRecord] = [
        *(GroupSettled(group, GroupOutcome.FAILED, why) for group in begun),
        *(
            Evicted(group, EvictionReason.ABANDONED, GlobalStep(ctx.progress.global_step + 1))
            for group in sorted([*begun, *finished])
        ),
        *(
            SessionRestarted(session, one.attempt + 1, why)
            for group in ctx.store.open_groups()
            if group.submitted.group not in begun
            for session, one in group.begun.items()
            if one.versions is not None and not set(one.versions) <= useful
        ),
    ]
    if records:
        await acknowledged(ctx.store, ctx.store.append_all(records))
    if begun or finished:
        ctx.events("groups_abandoned", {"groups": len(begun) + len(finished)})


def _useful_versions(
    ctx: TrainContext, current: PolicyVersion | None
) -> AbstractSet[PolicyVersion] | None:
    """Versions whose tokens may be trained on; None: all of them."""
    learner = ctx.config.learner
    if ctx.config.mode == "sync":
        return {current} if current is not None else set()
    if learner.importance.mode != "none" or learner.old_logprobs == "rollout":
        return None
    return ctx.store.state.published.keys()
