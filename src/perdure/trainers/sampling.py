"""Sampling in the asynchronous modes: keep prompts coming, wait for groups, say what holds it up.

Nothing polls: a step looks again whenever a group has settled, and at its deadlines.
"""

from __future__ import annotations

from dataclasses import dataclass

from perdure.core.errors import TrainingError
from perdure.core.faults import FaultPoint
from perdure.core.ids import GlobalStep, GroupId
from perdure.experience import Decision, decide
from perdure.experience.age_policy import prompt_age
from perdure.trainers.context import TrainContext
from perdure.trainers.prompts import MAX_REFILL_ROUNDS, next_prompts
from perdure.trainers.sampling_rules import sampling_rules


def submit_prompts(ctx: TrainContext, step: GlobalStep) -> None:
    """Submit prompts until the step and the batches ahead of it have enough.

    What is there already counts, so that a resume fills up instead of adding, and the end of the
    run is not overshot.
    """
    apply_decision(ctx, step)
    state, trainer = ctx.store.state, ctx.config.trainer
    steps_left = trainer.total_steps - step + 1
    batches = min(1 + ctx.config.sampler.num_warmup_batches, steps_left)
    taken = len(state.updates_of(step)) * ctx.groups_per_update
    available = len(state.table.finished) + len(ctx.store.open_groups())
    missing = batches * trainer.train_batch_size - taken - available
    if missing > 0:
        ctx.store.submit(next_prompts(ctx, step, count=missing))
        ctx.faults.reach(FaultPoint.GROUPS_SUBMITTED)
        ctx.runtime.groups_submitted()


async def wait_for_groups(ctx: TrainContext, step: GlobalStep, *, count: int) -> None:
    """Return when the ``count`` oldest finished groups may be taken.

    Consumes the background rollout; evicts what the rules exclude and submits one prompt for each;
    waits for groups to settle.

    Raises:
        TrainingError: No token and no group came for ``sampler.stall_timeout_s``; names what
            sampling waits for.
    """
    stall = _Stall(ctx)
    evicted = ctx.store.state.table.evictions.total()
    settled = await ctx.runtime.wait_for_settled(beyond=-1, timeout_s=0)
    with ctx.timed("wait"), ctx.awaiting(count):
        while True:
            decision = apply_decision(ctx, step)
            enough = len(ctx.store.state.table.finished) >= count
            if count == 0 or (enough and not decision.blocked_by):
                return
            settled = await ctx.runtime.wait_for_settled(
                beyond=settled, timeout_s=stall.patience_s()
            )
            stall.look(step, settled, decision, count)
            _limit_evictions(ctx, step, evicted)


def _limit_evictions(ctx: TrainContext, step: GlobalStep, before: int) -> None:
    """Raises ``TrainingError`` if what is generated keeps being thrown away."""
    evictions = ctx.store.state.table.evictions
    limit = MAX_REFILL_ROUNDS * ctx.config.trainer.train_batch_size
    if evictions.total() - before <= limit:
        return
    reasons = ", ".join(f"{reason.value} {count}" for reason, count in evictions.most_common())
    raise TrainingError(
        f"more than {limit} groups were evicted in a row (in the whole run: {reasons})",
        where=f"global step {step}",
        rule=f"a step replaces at most {MAX_REFILL_ROUNDS} batches of groups",
        way_out="look at why they are evicted (`perdure status RUN`): a verifier that fails, limits"
        " of sampler.* that are too tight, or a task with nothing left to learn; then resume",
    )


async def groups_at_hand(ctx: TrainContext, step: GlobalStep, *, count: int) -> None:
    """See that the next groups may be taken, of those that were waited for as one step.

    Waits for nothing: while the learner has the devices no group can come. What has finished since
    is evicted if the rules exclude it; the prompts in its place are submitted by the next step. An
    age limit of 1 would wait for them in this one, in vain.
    """
    _evict_unfit(ctx, step)
    assert len(ctx.store.state.table.finished) >= count


def apply_decision(ctx: TrainContext, step: GlobalStep) -> Decision:
    """Evict what the rules exclude and pay for every eviction with a new prompt.

    Returns what the rules say afterwards, the new prompts included.
    """
    decision = _evict_unfit(ctx, step)
    if not decision.refill:
        return decision
    ctx.store.refill(next_prompts(ctx, step, count=decision.refill))
    ctx.faults.reach(FaultPoint.GROUPS_SUBMITTED)
    ctx.runtime.groups_submitted()
    return decide(ctx.store.state, global_step=step, rules=sampling_rules(ctx.config))


def _evict_unfit(ctx: TrainContext, step: GlobalStep) -> Decision:
    decision = decide(ctx.store.state, global_step=step, rules=sampling_rules(ctx.config))
    if decision.evict:
        ctx.store.evict(decision.evict, global_step=step)
    return decision


@dataclass(slots=True)
class _Stall:
    """Notices that nothing moves, names the culprit, and gives up in the end."""

    ctx: TrainContext
    seen: tuple[int, int] = (-1, -1)
    since_s: float = 0.0
    warned: bool = False

    def __post_init__(self) -> None:
        self.since_s = self.ctx.clock.monotonic_s()

    def patience_s(self) -> float:
        """How long the next wait may take."""
        sampler = self.ctx.config.sampler
        limit_s = sampler.stall_timeout_s if self.warned else sampler.stall_warning_s
        return max(self.since_s + limit_s - self.ctx.clock.monotonic_s(), 0.0)

    def look(self, step: GlobalStep, settled: int, decision: Decision, count: int) -> None:
        """Raises ``TrainingError`` when nothing has moved for too long."""
        now_s = self.ctx.clock.monotonic_s()
        seen = (settled, self.ctx.runtime.generated_tokens)
        if seen != self.seen:
            self.seen, self.since_s, self.warned = seen, now_s, False
            return
        silent_s = now_s - self.since_s
        sampler = self.ctx.config.sampler
        if silent_s >= sampler.stall_timeout_s:
            raise TrainingError(
                f"nothing has moved for {silent_s:.0f} s: {culprit(self.ctx, step, decision)}",
                where=f"global step {step}, waiting for {count} finished groups",
                rule=f"sampler.stall_timeout_s is {sampler.stall_timeout_s:g}",
                way_out="resume the run; if it repeats, look at the engine, tool or verifier named"
                " here, or raise the limit",
            )
        if silent_s >= sampler.stall_warning_s and not self.warned:
            self.warned = True
            message = f"nothing has moved for {silent_s:.0f} s: {culprit(self.ctx, step, decision)}"
            self.ctx.events("warning", {"message": message})


def culprit(ctx: TrainContext, step: GlobalStep, decision: Decision) -> str:
    """What sampling waits for: a group, its state and age, and what its sessions do."""
    table = ctx.store.state.table
    waiting = [GroupId(group) for group in decision.blocked_by]
    oldest = waiting or [group.submitted.group for group in table.open()]
    if not oldest:
        return "no group is open"
    group = table.live[oldest[0]]
    running = [r for r in ctx.runtime.running_sessions() if r.session.group == oldest[0]]
    doing = "; ".join(
        f"session {r.session.index} is {r.doing}, {r.tokens} tokens, silent for {r.silent_s:.0f} s"
        for r in running[:3]
    )
    holds = "holds back sampling" if waiting else "is the oldest in progress"
    age = prompt_age(group.submitted, step)
    return (
        f"group {oldest[0]} {holds} ({group.state.value}, age {age},"
        f" {len(group.missing)} sessions missing{': ' + doing if doing else ''})"
    )
