"""What log and checkpoints cost: perdure's sync trainer beside a plain loop that loses everything.

    python benchmarks/overhead.py [RECIPE] [key=value ...] [--blocks N] [--steps N]

Both train the same recipe with the same engine, learner and task code, in one process, alternating
in blocks of steps. The plain loop keeps its experience in lists and saves nothing. Printed are
ratios of that one run: seconds and CPU-seconds per step (the writer threads' CPU counts against
perdure). Both end with the same weights, bit for bit, which is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from perdure.config import load_config
from perdure.core.clock import SystemClock
from perdure.core.events import ignore_events
from perdure.core.faults import NoFaults
from perdure.core.ids import GlobalStep, GroupId, LocalUpdate, PolicyVersion, SessionId, UpdateId
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.core.trajectories import RewardedGroup, Trajectory
from perdure.publish.in_process import InProcessPublisher
from perdure.runtime.sessions import trajectory_from_chunks
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

DEFAULT_RECIPE = Path(__file__).parent.parent / "recipes" / "sort_digits.yaml"


@dataclass(slots=True)
class Cost:
    """Seconds per step, one entry per block."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, wall_s: float, cpu_s: float, steps: int) -> None:
        self.wall_s.append(wall_s / steps)
        self.cpu_s.append(cpu_s / steps)


class PlainLoop:
    """The loop people write: generate, judge, update, publish. Nothing survives the process."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = make_task(config.task, config.seed)
        self.machinery = build_machinery(config, self.task)
        self.publisher = InProcessPublisher([self.machinery.engine])
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
            await self.machinery.engine.wake()
            self.asleep = False
        await self.publisher.publish(
            PolicyVersion(version), weights=learner.policy_weights(), digest=learner.policy_digest()
        )

    async def step(self, number: int) -> None:
        trainer = self.config.trainer
        first = self.next_prompt
        self.next_prompt += trainer.train_batch_size
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(self.group(i)) for i in range(first, self.next_prompt)]
        groups = [task.result() for task in pending]
        await self.machinery.engine.sleep()
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
        chunks = [chunk async for chunk in self.machinery.engine.generate(request)]
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
    step: Callable[[int], Awaitable[None]], cost: Cost, *, first: int, steps: int
) -> None:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for number in range(first, first + steps):
        await step(number)
    cost.add(time.perf_counter() - wall_s, time.process_time() - cpu_s, steps)


async def compare(config: RunConfig, run_dir: Path, *, blocks: int, steps: int) -> dict[str, float]:
    plain = PlainLoop(config)
    await plain.start()
    storage = PosixStorage(run_dir)
    started = Launch(run_dir, config, plain.task, storage, SystemClock(), NoFaults(), ignore_events)
    costs = {"plain": Cost(), "perdure": Cost()}
    async with incarnation(started) as ctx:
        for block in range(blocks):
            first = 1 + block * steps
            # Who goes first alternates, so that drift of the machine hits both alike.
            order = ("plain", "perdure") if block % 2 == 0 else ("perdure", "plain")
            for name in order:
                step = plain.step if name == "plain" else lambda n: durable_step(ctx, n)
                await measure(step, costs[name], first=first, steps=steps)
        same = await ctx.runtime.policy_digest() == plain.machinery.learner.policy_digest()
        ctx.checkpoints.wait(60.0)
        log_bytes = sum(path.stat().st_size for path in (run_dir / "log").iterdir())
    await plain.machinery.engine.close()
    return summary(costs, same=same, log_bytes=log_bytes, steps=blocks * steps)


def summary(costs: dict[str, Cost], *, same: bool, log_bytes: int, steps: int) -> dict[str, float]:
    wall = np.array(costs["perdure"].wall_s) / np.array(costs["plain"].wall_s)
    cpu = np.array(costs["perdure"].cpu_s) / np.array(costs["plain"].cpu_s)
    return {
        "steps": steps,
        "plain_ms_per_step": 1e3 * statistics.median(costs["plain"].wall_s),
        "perdure_ms_per_step": 1e3 * statistics.median(costs["perdure"].wall_s),
        "overhead_wall_percent": 100 * (float(np.median(wall)) - 1),
        "overhead_cpu_percent": 100 * (float(np.median(cpu)) - 1),
        "overhead_wall_percent_low": 100 * (float(np.quantile(wall, 0.25)) - 1),
        "overhead_wall_percent_high": 100 * (float(np.quantile(wall, 0.75)) - 1),
        "log_bytes_per_step": log_bytes / steps,
        "same_weights": float(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT_RECIPE)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    arguments = parser.parse_args()
    total = arguments.blocks * arguments.steps
    overrides = [
        *arguments.overrides,
        f"trainer.total_steps={total + 1}",
        "validation.prompts=0",
    ]
    config = load_config(RunConfig, arguments.recipe, overrides)
    fix_arithmetic(config)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        run_dir = Path(directory) / "run"
        launch.create(config, run_dir, injected=launch.Injected())
        result = asyncio.run(
            compare(config, run_dir, blocks=arguments.blocks, steps=arguments.steps)
        )
    for name, value in result.items():
        print(f"{name:28} {value:12.3f}")
    print(json.dumps(result))
    if not result["same_weights"]:
        sys.exit("the two loops trained different weights: the comparison does not hold")


if __name__ == "__main__":
    main()
