"""What log and checkpoints cost: perdure's sync trainer beside a plain loop that loses everything.

    python benchmarks/overhead.py [RECIPE] [key=value ...] [--steps N]

Both train the same recipe with the same engine, learner and task code, in one process, taking turns
step by step. The plain loop keeps its experience in lists and saves nothing. Both end with the same
weights, bit for bit, which is checked. Printed are medians over the steps of that one run:

* log and checkpoints: time that the training thread spends in the experience store and in the
  checkpoint engine (encoding, queueing, waiting for the disk, staging), and CPU time of their
  threads, as shares of perdure's step;
* the whole trainer beside the plain loop: the above, and digests, curves and TensorBoard files.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perdure.config import load_config
from perdure.core.clock import SystemClock
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, LocalUpdate, PolicyVersion, SessionId, UpdateId
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.core.trajectories import RewardedGroup, Trajectory
from perdure.publish import InProcessTransport, Publication
from perdure.runtime.trajectory_builder import trajectory_from_chunks
from perdure.storage import PosixStorage
from perdure.tasks.config import make_task
from perdure.trainers import launch
from perdure.trainers.assembly import build_machinery
from perdure.trainers.config import RunConfig
from perdure.trainers.context import TrainContext
from perdure.trainers.environment import fix_arithmetic
from perdure.trainers.recovery import Launch, incarnation
from perdure.trainers.steps import (
    complete_step,
    finish_step,
    generate_batch,
    local_update,
    take_groups,
)

STORE_CALLS = (
    "submit",
    "start_sessions",
    "sessions_done",
    "open_groups",
    "oldest_finished",
    "take",
    "append",
    "append_all",
    "rewarded_group",
    "release",
    "flush",
)
"""Everything the sync trainer asks of the experience store."""
DEFAULT_RECIPE = Path(__file__).parent.parent / "recipes" / "sort_digits.yaml"


@dataclass(slots=True)
class Cost:
    """One entry per step, in seconds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    """Time of the training thread inside the store and the checkpoint engine."""
    threads_cpu_s: list[float] = field(default_factory=list)
    """CPU time of all other threads."""


class Stopwatch:
    """Adds up the time that the training spends in methods of some objects."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def watch(self, owner: object, *names: str) -> None:
        """Time these methods of one object; calls from inside a timed call count once."""
        for name in names:
            setattr(type(owner), name, self._timed(getattr(type(owner), name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        main = threading.get_ident()

        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            # The training waits for a flush in another thread; commits by the checkpoint thread
            # are nobody's wait.
            waited_for = threading.get_ident() == main or method.__name__ == "flush"
            if not waited_for or self._depth:
                return method(*arguments, **options)
            self._depth += 1
            started_s = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.spent_s += time.perf_counter() - started_s
                self._depth -= 1

        return timed


class PlainLoop:
    """The loop people write: generate, judge, update, publish. Nothing survives the process."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = make_task(config.task, config.seed)
        self.machinery = build_machinery(config, self.task)
        pool = self.machinery.pool
        (self.engine,) = pool.takers.values()
        self.publication = Publication(pool, InProcessTransport())
        self.next_prompt = 0
        self.asleep = False
        rollout = config.rollout
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=(self.task.tokenizer.eos_id,),
        )

    async def start(self) -> None:
        supervised = self.config.learner.supervised
        learner = self.machinery.learner
        for step in range(supervised.steps):
            first = step * supervised.batch_size
            learner.supervised_step(
                step + 1,
                [self.task.demonstration(first + i) for i in range(supervised.batch_size)],
            )
        learner.begin_training()
        await self.publish(0)

    async def publish(self, version: int) -> None:
        learner = self.machinery.learner
        if self.asleep:
            await self.engine.wake()
            self.asleep = False
        await self.publication.publish(
            PolicyVersion(version), weights=learner.policy_weights(), digest=learner.policy_digest()
        )

    async def step(self, number: int) -> None:
        trainer = self.config.trainer
        first = self.next_prompt
        self.next_prompt += trainer.train_batch_size
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(self.group(i)) for i in range(first, self.next_prompt)]
        groups = [task.result() for task in pending]
        await self.engine.sleep()
        self.asleep = True
        per_update = trainer.train_batch_size // trainer.local_updates_per_step
        for k in range(trainer.local_updates_per_step):
            update = UpdateId(GlobalStep(number), LocalUpdate(k))
            batch = groups[k * per_update : (k + 1) * per_update]
            self.machinery.learner.local_update(update, batch)
        await self.publish(number)

    async def group(self, index: int) -> RewardedGroup:
        prompt = self.task.prompt(index)
        count = self.config.rollout.sessions_per_group
        sessions = [SessionId(GroupId(index), i) for i in range(count)]
        answers = await asyncio.gather(*(self.answer(prompt.prompt_ids, s) for s in sessions))
        rewards = [
            self.task.verify(prompt, answer.response_ids_T.tolist()).reward for answer in answers
        ]
        return RewardedGroup(index, tuple(answers), tuple(rewards))

    async def answer(self, prompt_ids: tuple[int, ...], session: SessionId) -> Trajectory:
        request = GenerationRequest(
            request_id=session.key(),
            prompt_ids=prompt_ids,
            sampling=self.sampling,
            random_key=(self.config.seed, session.group, session.index),
        )
        chunks = [chunk async for chunk in self.engine.generate(request)]
        return trajectory_from_chunks(session, prompt_ids=prompt_ids, chunks=chunks)


async def durable_step(ctx: TrainContext, number: int) -> None:
    """One turn of ``trainers/sync.py``."""
    step = GlobalStep(number)
    await generate_batch(ctx, step)
    await ctx.runtime.sleep_rollout()
    for k in range(ctx.config.trainer.local_updates_per_step):
        update = UpdateId(step, LocalUpdate(k))
        await local_update(ctx, update, await take_groups(ctx, update))
    await finish_step(ctx, step)
    await complete_step(ctx, step)


async def measure(
    step: Callable[[int], Awaitable[None]], cost: Cost, *, number: int, watch: Stopwatch
) -> None:
    watch.spent_s = 0.0
    wall_s, cpu_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
    await step(number)
    cost.wall_s.append(time.perf_counter() - wall_s)
    cost.cpu_s.append(time.process_time() - cpu_s)
    cost.threads_cpu_s.append(cost.cpu_s[-1] - (time.thread_time() - own_s))
    cost.durable_s.append(watch.spent_s)


async def compare(config: RunConfig, run_dir: Path, *, steps: int) -> dict[str, float]:
    plain = PlainLoop(config)
    await plain.start()
    storage = PosixStorage(run_dir)
    started = Launch(run_dir, config, plain.task, storage, SystemClock(), NoFaults(), ignore_events)
    costs = {"plain": Cost(), "perdure": Cost()}
    watch = Stopwatch()
    async with incarnation(started) as ctx:
        watch.watch(ctx.store, *STORE_CALLS)
        watch.watch(ctx.checkpoints, "stage")
        for number in range(1, steps + 1):
            # Who goes first alternates, so that drift of the machine hits both alike.
            for name in ("plain", "perdure") if number % 2 else ("perdure", "plain"):
                step = plain.step if name == "plain" else functools.partial(durable_step, ctx)
                await measure(step, costs[name], number=number, watch=watch)
        same = await ctx.runtime.policy_digest() == plain.machinery.learner.policy_digest()
        ctx.checkpoints.wait(60.0)
        log_bytes = sum(path.stat().st_size for path in (run_dir / "log").iterdir())
    await plain.machinery.close()
    return summary(costs, same=same, log_bytes=log_bytes)


def summary(costs: dict[str, Cost], *, same: bool, log_bytes: int) -> dict[str, float]:
    plain, perdure = costs["plain"], costs["perdure"]
    step_s = statistics.median(perdure.wall_s)
    ratio = [a / b for a, b in zip(perdure.wall_s, plain.wall_s, strict=True)]
    return {
        "steps": len(ratio),
        "plain_ms_per_step": 1e3 * statistics.median(plain.wall_s),
        "perdure_ms_per_step": 1e3 * step_s,
        "log_and_checkpoints_ms": 1e3 * statistics.median(perdure.durable_s),
        "log_and_checkpoints_percent": 100 * statistics.median(perdure.durable_s) / step_s,
        "their_threads_cpu_percent": 100 * statistics.median(perdure.threads_cpu_s) / step_s,
        "whole_trainer_percent": 100 * (step_s / statistics.median(plain.wall_s) - 1),
        "whole_trainer_percent_low": 100 * (float(np.quantile(ratio, 0.25)) - 1),
        "whole_trainer_percent_high": 100 * (float(np.quantile(ratio, 0.75)) - 1),
        "log_bytes_per_step": log_bytes / len(ratio),
        "same_weights": float(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT_RECIPE)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    overrides = [
        *arguments.overrides,
        f"trainer.total_steps={arguments.steps + 1}",
        "validation.prompts=0",
    ]
    config = load_config(RunConfig, arguments.recipe, overrides)
    fix_arithmetic(config)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        run_dir = Path(directory) / "run"
        launch.create(config, run_dir, injected=launch.Injected())
        result = asyncio.run(compare(config, run_dir, steps=arguments.steps))
    for name, value in result.items():
        print(f"{name:28} {value:12.3f}")
    print(json.dumps(result))
    if not result["same_weights"]:
        sys.exit("the two loops trained different weights: the comparison does not hold")


if __name__ == "__main__":
    main()
