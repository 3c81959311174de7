"""Submitting, evicting, refilling and waiting over a real store: exact counts, nothing polled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import experience_records as make
import pytest
from drill_tools import RECIPE, Events

from perdure.config import load_config
from perdure.core.clock import ManualClock
from perdure.core.errors import TrainingError
from perdure.core.experience_records import GroupSettled
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, IncarnationNumber, SessionId
from perdure.core.record_types import EvictionReason, GroupOutcome
from perdure.experience import (
    ExperienceStore,
    FinishedSession,
    LogOptions,
    RunInfo,
    claim_experience,
    create_run,
)
from perdure.storage.memory import MemoryStorage
from perdure.tasks.config import make_task
from perdure.trainers.config import RunConfig
from perdure.trainers.sampling import (
    apply_decision,
    groups_at_hand,
    submit_prompts,
    wait_for_groups,
)

STEP = GlobalStep(1)


class FakeRuntime:
    """Settles groups when it is waited for, as ``script`` says: one entry a wait."""

    def __init__(self, clock: ManualClock) -> None:
        self.script: list[Callable[[], None]] = []
        self.generated_tokens = 0
        self.submissions = 0
        self.on_submitted: Callable[[], None] | None = None
        self._clock = clock
        self._settled = 0

    def groups_submitted(self) -> None:
        self.submissions += 1
        told, self.on_submitted = self.on_submitted, None
        if told is not None:
            told()

    def running_sessions(self) -> list[Any]:
        return []

    async def wait_for_settled(self, *, beyond: int, timeout_s: float) -> int:
        if beyond < 0:
            return self._settled
        if self.script:
            self.script.pop(0)()
            self._settled += 1
        else:
            self._clock.advance(timeout_s)
        return self._settled


@pytest.fixture
def store() -> Iterator[ExperienceStore]:
    storage, clock = MemoryStorage(), ManualClock()
    create_run(storage, RunInfo("5" * 32, 0.0))
    options = LogOptions(threaded=False)
    claimed = claim_experience(storage, clock=clock, faults=NoFaults(), options=options)
    assert claimed.incarnation == IncarnationNumber(1)
    store = claimed.start()
    yield store
    store.check()
    store.close("over")


def context(store: ExperienceStore, *overrides: str) -> Any:
    """What sampling works on; batches of four groups of two sessions."""
    base = ("mode=separate_async", "rollout.sessions_per_group=2")
    config = load_config(RunConfig, RECIPE, [*base, *overrides])
    clock = ManualClock()
    return SimpleNamespace(
        store=store,
        config=config,
        task=make_task(config.task, config.seed),
        runtime=FakeRuntime(clock),
        clock=clock,
        faults=NoFaults(),
        events=Events(),
        groups_per_update=config.trainer.train_batch_size,
        timed=nullcontext,
        awaiting=nullcontext,
    )


def finish(store: ExperienceStore, *groups: int, uniform: bool = False) -> None:
    for group in groups:
        sessions = [
            FinishedSession(make.trajectory(group, index), 1.0 if uniform else float(index), {})
            for index in range(2)
        ]
        store.start_sessions([SessionId(GroupId(group), index) for index in range(2)])
        store.sessions_done(sessions, settled=[GroupSettled(GroupId(group), GroupOutcome.FINISHED)])


def fail(store: ExperienceStore, *groups: int) -> None:
    for group in groups:
        store.sessions_done([], settled=[GroupSettled(GroupId(group), GroupOutcome.FAILED, "no")])


def submitted(store: ExperienceStore) -> int:
    return int(store.state.table.next_group)


@pytest.mark.parametrize(("warmup", "step", "count"), [(0, 1, 4), (1, 1, 8), (3, 1, 16), (3, 6, 4)])
def test_a_step_and_the_batches_ahead_get_as_many_prompts_as_they_lack(
    store: ExperienceStore, warmup: int, step: int, count: int
) -> None:
    ctx = context(store, f"sampler.num_warmup_batches={warmup}")
    submit_prompts(ctx, GlobalStep(step))
    assert (submitted(store), ctx.runtime.submissions) == (count, 1)
    finish(store, 0)
    submit_prompts(ctx, GlobalStep(step))
    assert (submitted(store), ctx.runtime.submissions) == (count, 1)


def test_failed_groups_are_replaced_one_for_one(store: ExperienceStore) -> None:
    ctx = context(store, "sampler.num_warmup_batches=0")
    submit_prompts(ctx, STEP)
    fail(store, 1, 3)
    assert apply_decision(ctx, STEP).evict == ()
    assert (submitted(store), ctx.runtime.submissions) == (6, 2)
    assert not store.state.table.owed
    apply_decision(ctx, STEP)
    assert (submitted(store), ctx.runtime.submissions) == (6, 2)


def test_what_settles_during_a_decision_is_judged_by_the_next_one(store: ExperienceStore) -> None:
    ctx = context(store, "sampler.num_warmup_batches=0", "sampler.dynamic_filter=true")
    submit_prompts(ctx, STEP)
    finish(store, 0, uniform=True)
    ctx.runtime.on_submitted = lambda: finish(store, 1, uniform=True)
    apply_decision(ctx, STEP)
    assert (submitted(store), store.state.table.evictions.total()) == (5, 1)
    apply_decision(ctx, STEP)
    assert store.state.table.evictions == {EvictionReason.FILTERED: 2}
    assert (submitted(store), ctx.runtime.submissions) == (6, 3)


def test_waiting_ends_when_enough_have_finished(store: ExperienceStore) -> None:
    ctx = context(store)
    submit_prompts(ctx, STEP)
    ctx.runtime.script = [lambda n=n: finish(store, n) for n in (5, 2, 0, 1, 7)]
    asyncio.run(wait_for_groups(ctx, STEP, count=4))
    assert [int(group) for group in store.state.table.finished] == [0, 1, 2, 5]
    assert len(ctx.runtime.script) == 1


def test_old_prompts_hold_back_a_full_batch(store: ExperienceStore) -> None:
    ctx = context(store, "sampler.age_policy=wait", "sampler.max_prompt_age=2")
    submit_prompts(ctx, STEP)
    finish(store, 0, 1, 2, 3)
    ctx.runtime.script = [lambda n=n: finish(store, n) for n in (4, 5, 6, 7)]
    asyncio.run(wait_for_groups(ctx, GlobalStep(2), count=4))
    assert len(store.state.table.finished) == 8
    assert not store.state.table.evictions


def test_a_replacement_as_old_as_the_limit_is_waited_for(store: ExperienceStore) -> None:
    ctx = context(
        store,
        "sampler.age_policy=wait",
        "sampler.max_prompt_age=1",
        "sampler.num_warmup_batches=0",
    )
    submit_prompts(ctx, STEP)
    finish(store, 0, 1, 2)
    fail(store, 3)
    ctx.runtime.script = [lambda: finish(store, 4)]
    asyncio.run(wait_for_groups(ctx, STEP, count=3))
    assert not ctx.runtime.script


def test_with_the_devices_in_use_nobody_is_waited_for_or_submitted(store: ExperienceStore) -> None:
    ctx = context(store, "sampler.age_policy=wait", "sampler.max_prompt_age=1")
    submit_prompts(ctx, STEP)
    finish(store, 0, 1, 2, 3)
    fail(store, 4)
    asyncio.run(groups_at_hand(ctx, STEP, count=4))
    assert (submitted(store), len(store.state.table.owed)) == (8, 1)


def test_endless_evictions_are_given_up_with_their_reasons(store: ExperienceStore) -> None:
    ctx = context(store, "sampler.num_warmup_batches=0")
    submit_prompts(ctx, STEP)
    ctx.runtime.script = [lambda n=n: fail(store, n) for n in range(60)]
    with pytest.raises(TrainingError, match=r"more than 40 groups were evicted .*failed 4"):
        asyncio.run(wait_for_groups(ctx, STEP, count=4))


def test_a_stall_is_warned_of_and_then_given_up_naming_the_culprit(store: ExperienceStore) -> None:
    ctx = context(store)
    submit_prompts(ctx, STEP)
    with pytest.raises(TrainingError, match="group 0 is the oldest in progress") as caught:
        asyncio.run(wait_for_groups(ctx, STEP, count=4))
    assert "sampler.stall_timeout_s" in caught.value.rule
    (warning,) = ctx.events.of("warning")
    assert "nothing has moved for 60 s: group 0" in str(warning["message"])
