"""What may befall a simulated run, drawn from its seed."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from perdure.config import load_config
from perdure.core.agent_api import ToolKind
from perdure.core.keyed_random import generator
from perdure.trainers.config import RunConfig

T = TypeVar("T")
RECIPE = Path(__file__).parents[1] / "drills" / "drill_recipe.yaml"


class Ending(enum.Enum):
    """How a life of a run ends, unless the training is over before."""

    POWER = "power"
    """The machine loses power; what was not synced is gone, kept or torn."""
    KILL = "kill"
    """The process is killed; what was written stays."""
    STOP = "stop"
    """SIGTERM: an orderly stop."""
    DISK = "disk"
    """Storage operations fail or are slow; the run goes on, or ends with what the disk says."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    Attributes:
        endings: Of the lives before the last one, in order.
        rewinds: Numbers of the lives (from 2) that go on without redo.
        limits: Fields of ``sampler``; also what a recipe may not say, so that much is evicted.
        engines: Of ``separate_async``.
        shared_engines: Of the other modes.
        deaths: Engines killed on the way.
        deaths_asked: Engines that die when they are asked to pause.
        wedges: Engines that stop answering on the way.
        replaced: Lost engines are replaced; otherwise one is always left.
        wrong_digests: Publications that one engine acknowledges wrongly.
        late: Share of publications that an engine acknowledges too late.
        slow: Share of sessions whose tokens take thirty times as long.
        failing: Share of answers at which the verifier raises.
        hanging: Share of answers on which the verifier gives no verdict, ever.
        tools: Sessions call a tool of this kind; None: one answer.
    """

    seed: int
    mode: str
    overrides: tuple[str, ...] = ()
    endings: tuple[Ending, ...] = ()
    rewinds: tuple[int, ...] = ()
    limits: Mapping[str, object] = field(default_factory=dict[str, object])
    engines: int = 2
    shared_engines: int = 1
    deaths: int = 0
    deaths_asked: int = 0
    wedges: int = 0
    replaced: bool = False
    wrong_digests: int = 0
    late: float = 0.0
    slow: float = 0.0
    failing: float = 0.0
    hanging: float = 0.0
    tools: ToolKind | None = None

    def config(self) -> RunConfig:
        config = load_config(
            RunConfig,
            RECIPE,
            [
                f"mode={self.mode}",
                "learner.supervised.steps=0",
                "validation.prompts=0",
                "rollout.max_new_tokens=24",
                "rollout.partial_tokens=4",
                "deterministic=false",
                *self.overrides,
            ],
        )
        sampler = config.sampler.model_copy(update=dict(self.limits))
        return config.model_copy(update={"sampler": sampler})


def drawn(mode: str, seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = generator(seed, f"scenario {mode}")
    lives = int(rng.integers(5))
    overrides = [f"trainer.local_updates_per_step={_one_of(rng, (1, 2, 4))}"]
    overrides.append(f"sampler.dynamic_filter={str(rng.random() < 0.2).lower()}")
    separate = mode == "separate_async"
    replaced = bool(rng.random() < 0.5)
    limits = {} if mode == "sync" else _limits(rng)
    if separate:
        overrides.append(f"rollout.spillover={str(rng.random() < 0.5).lower()}")
    shared = generator(seed, f"shared engines {mode}")
    remote = not separate and bool(shared.random() < 0.4)
    sessions = generator(seed, f"sessions {mode}")
    if sessions.random() < 0.15:
        overrides.append("rollout.continue_partials=false")
    return Scenario(
        seed,
        mode,
        tuple(overrides),
        limits=limits,
        endings=tuple(_one_of(rng, tuple(Ending)) for _ in range(lives)),
        rewinds=tuple(life for life in range(2, lives + 2) if rng.random() < 0.1),
        engines=int(rng.integers(1 if replaced else 2, 4)),
        shared_engines=int(shared.integers(1, 3)) if remote else 1,
        deaths=int((rng if separate else shared).integers(3)) if separate or remote else 0,
        deaths_asked=int(shared.integers(3)) if remote else 0,
        wedges=int((rng if separate else shared).integers(2)) if separate or remote else 0,
        replaced=replaced if separate else remote,
        wrong_digests=int(rng.integers(3)) if separate else 0,
        late=0.2 if separate and rng.random() < 0.3 else 0.0,
        slow=0.05 if rng.random() < 0.3 else 0.0,
        failing=0.02 if rng.random() < 0.3 else 0.0,
        hanging=0.01 if sessions.random() < 0.2 else 0.0,
        tools=_one_of(sessions, tuple(ToolKind)) if sessions.random() < 0.5 else None,
    )


def _limits(rng: np.random.Generator) -> dict[str, object]:
    found: dict[str, object] = {
        "max_prompt_age": int(rng.integers(1, 5)),
        "age_policy": _one_of(rng, ("drop", "wait")),
        "num_warmup_batches": int(rng.integers(4)),
    }
    if rng.random() < 0.25:
        found["max_version_span"] = int(rng.integers(1, 4))
    if rng.random() < 0.25:
        found["max_version_lag"] = int(rng.integers(3))
    return found


def _one_of(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]
