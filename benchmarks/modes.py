"""Steps per hour of the three trainer modes, on simulated devices and on this machine's CPUs.

    python benchmarks/modes.py [--seeds N] [--steps N] [--real]

Simulated: the real trainer, log, checkpoints, pool and publication run on a clock that jumps, over
fake devices that cost fixed times, so that two pools are really two. The machine has two equal
halves. In ``sync`` and ``colocate_async`` both halves generate and both train; in
``separate_async`` one generates and the other trains, so that an update takes twice as long there
and half as many requests are decoded at once. Lengths of answers and latencies of tools have long
tails. Printed are means over the seeds:

* steps per hour after the first ``WARM_UP`` steps, and their ratio to ``sync``; aimed at are 1.5
  for ``colocate_async`` and 1.6 for ``separate_async``;
* the share of the time in which the learner's devices neither train nor generate for want of
  groups (``sync`` and ``colocate_async``: in which they do not train);
* the same where the learner waits more, with and without spillover.

``--real`` trains ``sort_digits`` in each mode on this machine's cores, in turns. There is no
target for it: cores that are shared cannot be two pools.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "simulation"), str(ROOT / "tests")]

from fakes import EngineTraits, FakeEngine  # noqa: E402
from scenarios import Scenario  # noqa: E402
from sim_world import World  # noqa: E402
from virtual_loop import Device  # noqa: E402

from perdure.config import load_config  # noqa: E402
from perdure.core.keyed_random import generator  # noqa: E402
from perdure.core.record_types import StopReason  # noqa: E402
from perdure.core.rollout_api import GenerationChunk, GenerationRequest  # noqa: E402
from perdure.rollout import EnginePool  # noqa: E402
from perdure.trainers import launch  # noqa: E402
from perdure.trainers.config import RunConfig  # noqa: E402

MODES = ("sync", "colocate_async", "separate_async")
TARGETS = {"colocate_async": 1.5, "separate_async": 1.6}
WARM_UP = 3
GROUPS, SESSIONS, UPDATES, LONGEST = 16, 8, 2, 1024
SLOTS = 64
"""Requests that one half decodes at once."""
TOKEN_S = 0.02
"""A decode step of one half, whatever its batch."""
PREFILL_S = 0.1
LOAD_S = 0.5
"""Loading published weights into an engine."""
TOOL_SHARE = 0.3
"""Of the sessions call a tool once, half-way."""


@dataclass(frozen=True)
class Load:
    """What is trained.

    Attributes:
        mean_tokens: Of an answer; lengths are log-normal with ``spread``, at most ``LONGEST``.
        update_s: A local update on both halves.
        ahead: Batches of prompts that run ahead.
    """

    mean_tokens: float = 150.0
    spread: float = 0.9
    update_s: float = 2.5
    ahead: int = 1


LOADS = {
    "balanced": Load(),
    "the learner waits": Load(update_s=0.75, ahead=3),
}


class ToolUsers:
    """Sessions of which some call a tool half-way: no engine works for them meanwhile."""

    def __init__(self, pool: EnginePool, length: Callable[[Sequence[int]], int], seed: int) -> None:
        self._pool = pool
        self._length = length
        self._seed = seed

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk]:
        rng = generator(self._seed, "tool", *request.random_key)
        length = min(self._length(request.random_key), request.sampling.max_new_tokens)
        tokens: list[int] = []
        if rng.random() < TOOL_SHARE and length > 1:
            half = replace(request.sampling, max_new_tokens=length // 2)
            async for chunk in self._pool.generate(replace(request, sampling=half)):
                tokens += chunk.token_ids.tolist()
                reason = chunk.stop_reason
                assert reason in (None, StopReason.LENGTH)
                yield replace(chunk, stop_reason=None)
            await asyncio.sleep(min(float(rng.lognormal(0.5, 1.0)), 30.0))
        async for chunk in self._pool.generate(replace(request, prefix_ids=tuple(tokens))):
            yield chunk


@dataclass
class Measured:
    """Seconds at which steps ended, and what the learner's devices did until then."""

    ended_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    lent_s: list[float] = field(default_factory=list)

    @property
    def steps_per_hour(self) -> float:
        return 3600 * (len(self.ended_s) - WARM_UP) / (self.ended_s[-1] - self.ended_s[WARM_UP - 1])

    @property
    def idle_share(self) -> float:
        """Neither training nor lent, switches included."""
        first, last = WARM_UP - 1, -1
        worked = sum(each[last] - each[first] for each in (self.busy_s, self.lent_s))
        return 1 - worked / (self.ended_s[last] - self.ended_s[first])


class Machine(World):
    """The simulated world with fixed costs and no faults."""

    slots = SLOTS

    def __init__(self, scenario: Scenario, load: Load) -> None:
        super().__init__(scenario)
        self.load = load
        separate = scenario.mode == "separate_async"
        self.learner = Device(lambda: load.update_s * (2 if separate else 1))
        self.measured = Measured()
        self._lent_s = 0.0

    def device(self) -> Device:
        return self.learner

    def engine(self) -> FakeEngine:
        traits = EngineTraits(
            token_s=lambda: TOKEN_S,
            length=self._length,
            pace=lambda _: 1.0,
            load_s=lambda: LOAD_S,
            prefill_s=PREFILL_S,
            slots=SLOTS,
            chunk=32,
        )
        return FakeEngine(traits, self.task.max_prompt_tokens + LONGEST)

    def agent(self, pool: EnginePool) -> ToolUsers:  # type: ignore[override]
        return ToolUsers(pool, self._length, self.scenario.seed)

    def _length(self, key: Sequence[int]) -> int:
        spread = self.load.spread
        middle = self.load.mean_tokens / 2.718281828 ** (spread**2 / 2)
        rng = generator(self.scenario.seed, "length", *key)
        return int(min(max(middle * rng.lognormal(0.0, spread), 1), LONGEST))

    def on_event(self, name: str, fields: dict[str, object]) -> None:
        if name == "learner_returned":
            self._lent_s += float(str(fields["seconds"]))
        elif name == "published":
            self.measured.ended_s.append(self.clock.monotonic_s())
            self.measured.busy_s.append(self.learner.busy_s)
            self.measured.lent_s.append(self._lent_s)


def simulate(mode: str, load: Load, *, seed: int, steps: int, spillover: bool = False) -> Measured:
    """One run in virtual time."""
    overrides = (
        f"trainer.total_steps={steps}",
        f"sampler.num_warmup_batches={load.ahead}",
        f"trainer.train_batch_size={GROUPS}",
        f"trainer.local_updates_per_step={UPDATES}",
        f"rollout.sessions_per_group={SESSIONS}",
        f"rollout.max_new_tokens={LONGEST}",
        f"rollout.spillover={str(spillover).lower()}",
        "log.segment_bytes=67108864",
        "checkpoint.every_steps=1000",
    )
    scenario = Scenario(seed, mode, overrides, engines=1, shared_engines=2)
    machine = Machine(scenario, load)
    machine.run()
    # The first publication comes before training.
    measured = machine.measured
    for values in (measured.ended_s, measured.busy_s, measured.lent_s):
        del values[0]
    return measured


def report_simulated(seeds: int, steps: int) -> None:
    for name, load in LOADS.items():
        print(f"{name}: {load.mean_tokens:g} tokens on average, at most {LONGEST}; a local update")
        print(f"takes {load.update_s:g} s on both halves; {load.ahead} batches run ahead")
        rows = [(mode, False) for mode in MODES] + [("separate_async", True)]
        sync: list[float] = []
        for mode, spillover in rows:
            runs = [
                simulate(mode, load, seed=seed, steps=steps, spillover=spillover)
                for seed in range(seeds)
            ]
            rates = [run.steps_per_hour for run in runs]
            sync = sync or rates
            ratios = [rate / base for rate, base in zip(rates, sync, strict=True)]
            idle = statistics.mean(run.idle_share for run in runs)
            shown = f"{mode}{' with spillover' if spillover else ''}"
            print(
                f"  {shown:<30} {statistics.mean(rates):6.0f} steps/h"
                f"  {statistics.mean(ratios):5.2f} x sync ({min(ratios):.2f} to {max(ratios):.2f})"
                f"  learner idle {idle:4.0%}"
            )


def report_real(steps: int) -> None:
    """Wall-clock steps per hour on this machine, steps 2 to the last, the best of two rounds."""
    best: dict[str, float] = {}
    for _ in range(2):
        for mode in MODES:
            best[mode] = max(best.get(mode, 0.0), _train(mode, steps))
    for mode, rate in best.items():
        print(f"  {mode:<30} {rate:6.0f} steps/h  {rate / best['sync']:5.2f} x sync")


def _train(mode: str, steps: int) -> float:
    ended_s: list[float] = []

    def on_event(name: str, fields: dict[str, object]) -> None:
        del fields
        if name == "step":
            ended_s.append(time.perf_counter())

    overrides = [f"mode={mode}", f"trainer.total_steps={steps}", "validation.prompts=0"]
    overrides += ["learner.supervised.steps=0"]
    config = load_config(RunConfig, ROOT / "recipes" / "sort_digits.yaml", overrides)
    with tempfile.TemporaryDirectory() as directory:
        launch.train(config, Path(directory, "run"), display=on_event)
    return 3600 * (len(ended_s) - 1) / (ended_s[-1] - ended_s[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="simulated runs of each kind")
    parser.add_argument("--steps", type=int, default=20, help="global steps of each run")
    parser.add_argument("--real", action="store_true", help="this machine's cores as well")
    args = parser.parse_args()
    report_simulated(args.seeds, args.steps)
    if args.real:
        print("this machine's cores, sort_digits:")
        report_real(args.steps)


if __name__ == "__main__":
    main()
