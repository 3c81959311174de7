"""Lends the learner's devices to the rollout pool while the learner waits (spec B3, B4)."""

from __future__ import annotations

from dataclasses import asdict

from perdure.core.ids import GlobalStep
from perdure.runtime.api import RolloutLoad
from perdure.trainers.context import TrainContext
from perdure.trainers.sampling import wait_for_groups
from perdure.trainers.spillover import (
    GroupPace,
    Situation,
    SpilloverDecision,
    SpilloverRules,
    SwitchCosts,
    Threshold,
    decide_spillover,
)


class LearnerLending:
    """Waits for groups, and has the learner generate meanwhile where that pays.

    The first wait is shared in any case: no engine is busy before it. Later ones are with
    ``rollout.spillover``. The learner is back before anything is taken.
    """

    def __init__(self, ctx: TrainContext, rules: SpilloverRules | None = None) -> None:
        rules = rules or SpilloverRules()
        self._ctx = ctx
        self._enabled = ctx.config.rollout.spillover
        self._threshold = Threshold(rules, rules.ratio)
        self._costs = SwitchCosts(rules.window)
        self._pace = GroupPace(rules.window * ctx.config.trainer.local_updates_per_step)
        self._first = True
        self._step = 0
        self._idle_s = 0.0
        self._looked_s = ctx.clock.monotonic_s()
        self._settled = 0

    async def wait_for_groups(self, ctx: TrainContext, step: GlobalStep, *, count: int) -> None:
        """As ``sampling.wait_for_groups``; with help of the learner if that is worth it."""
        self._adapt(step)
        missing = count - len(ctx.store.state.table.finished)
        load = ctx.runtime.rollout_load()
        self._measure(load, scaling=1.0)
        decision = self._decide(step, missing, load)
        if decision.lend:
            target = max(count, min(self._target(step), self._reachable()))
            await self._wait_with_help(step, count if self._first else target, load)
        self._first = False
        began_s = ctx.clock.monotonic_s()
        # Also after a visit: what may be taken is decided in the turn in which it is taken.
        await wait_for_groups(ctx, step, count=count)
        self._idle_s += ctx.clock.monotonic_s() - began_s

    def _decide(self, step: GlobalStep, missing: int, load: RolloutLoad) -> SpilloverDecision:
        now = Situation(
            missing=missing,
            queued=load.queued,
            scaling=load.scaling,
            seconds_per_group=self._pace.seconds_per_group,
            switch_s=self._costs.switch_s,
        )
        if self._first and missing > 0 and load.scaling > 1:
            decision = SpilloverDecision(lend=True, reason="the first batch")
        elif self._enabled:
            decision = decide_spillover(now)
        else:
            return SpilloverDecision(lend=False, reason="rollout.spillover is off")
        fields: dict[str, object] = {
            "global_step": step,
            **asdict(decision),
            **asdict(now),
            "target": self._target(step),
            "ratio": self._threshold.ratio,
        }
        self._ctx.events("spillover", fields)
        return decision

    async def _wait_with_help(self, step: GlobalStep, target: int, load: RolloutLoad) -> None:
        ctx = self._ctx
        began_s = ctx.clock.monotonic_s()
        with ctx.timed("switch"):
            lent = await ctx.runtime.lend_learner()
        if not lent:
            return
        joined_s = ctx.clock.monotonic_s()
        try:
            await wait_for_groups(ctx, step, count=target)
        finally:
            left_s = ctx.clock.monotonic_s()
            with ctx.timed("switch"):
                await ctx.runtime.reclaim_learner()
        self._measure(ctx.runtime.rollout_load(), scaling=load.scaling)
        self._costs.joins_s.append(joined_s - began_s)
        self._costs.leaves_s.append(ctx.clock.monotonic_s() - left_s)
        fields: dict[str, object] = {
            "global_step": step,
            "seconds": left_s - joined_s,
            "switch_s": self._costs.joins_s[-1] + self._costs.leaves_s[-1],
        }
        ctx.events("learner_returned", fields)

    def _measure(self, load: RolloutLoad, *, scaling: float) -> None:
        """Note how fast groups have settled since the last time."""
        now_s = self._ctx.clock.monotonic_s()
        groups, seconds = load.settled - self._settled, now_s - self._looked_s
        self._pace.settled(groups, seconds=seconds, scaling=scaling)
        self._settled, self._looked_s = load.settled, now_s

    def _adapt(self, step: GlobalStep) -> None:
        """Once a step: whether the learner waited alone for longer than a visit costs."""
        if step == self._step:
            return
        if self._step:
            self._threshold = self._threshold.after(idle=self._idle_s > (self._costs.switch_s or 0))
        self._step, self._idle_s = step, 0.0

    def _target(self, step: GlobalStep) -> int:
        """Groups that are to be ready before the learner leaves; not more than the step takes."""
        ctx, trainer = self._ctx, self._ctx.config.trainer
        updates = trainer.local_updates_per_step
        left = updates - len(ctx.store.state.updates_of(step))
        wanted = self._threshold.groups(batch=trainer.train_batch_size, updates=updates)
        return min(wanted, left * ctx.groups_per_update)

    def _reachable(self) -> int:
        """Groups that can be ready without another prompt."""
        return len(self._ctx.store.state.table.finished) + len(self._ctx.store.open_groups())
