"""Whether a run fits into memory, estimated before it is made."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import ConfigError
from perdure.core.events import EventSink
from perdure.models import parameter_count
from perdure.tasks.api import Task
from perdure.trainers.assembly import WEIGHT_BYTES, engine_options, model_shape
from perdure.trainers.config import RunConfig

SESSION_BYTES = 4096
"""What a session takes at least, its tokens aside, from its start until its batch is trained."""
EXAMPLE_BYTES = 256
"""The same for an example of the warm start."""
ROLLOUT_TOKEN_BYTES = 9
"""A token as it was sampled: id, log-probability, mask."""
UPDATE_TOKEN_BYTES = 63
"""A token of a local update, padding included: ids, indexes, masks, and the learner's signals."""

ENGINE_BYTES = 220 * 2**20
"""What a process with an engine has for itself before it holds weights (measured, torch 2.13)."""

LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container says how much memory it may use."""
AVAILABLE_FILE = Path("/proc/meminfo")

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the machine (or container), and how many of them can be had now."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one setting makes a step hold at once, beside what is trained."""

    field: str
    value: int | str
    at_least: int
    at_most: int
    smaller: str
    """Settings that lower it."""


def step_needs(config: RunConfig, task: Task) -> tuple[Need, ...]:
    """What a step, a step of the warm start, the policy anchor and engine processes hold."""
    trainer, supervised = config.trainer, config.learner.supervised
    batch = trainer.train_batch_size * config.rollout.sessions_per_group
    ahead = 0 if config.mode == "sync" else config.sampler.num_warmup_batches
    sessions = batch * (1 + ahead)
    longest = task.max_prompt_tokens + config.rollout.max_new_tokens
    at_once = batch // trainer.local_updates_per_step
    tokens = sessions * longest * ROLLOUT_TOKEN_BYTES + at_once * longest * UPDATE_TOKEN_BYTES
    examples = supervised.batch_size if supervised.steps else 0
    shown = task.max_prompt_tokens + task.max_answer_tokens
    return (
        Need(
            "trainer.train_batch_size",
            trainer.train_batch_size,
            at_least=sessions * SESSION_BYTES,
            at_most=sessions * SESSION_BYTES + tokens,
            smaller="trainer.train_batch_size, rollout.sessions_per_group or"
            " rollout.max_new_tokens" + (", or sampler.num_warmup_batches" if ahead else ""),
        ),
        Need(
            "learner.supervised.batch_size",
            supervised.batch_size,
            at_least=examples * EXAMPLE_BYTES,
            at_most=examples * (EXAMPLE_BYTES + shown * UPDATE_TOKEN_BYTES),
            smaller="learner.supervised.batch_size",
        ),
        _anchor_need(config, task),
        _engines_need(config, task),
    )


def _anchor_need(config: RunConfig, task: Task) -> Need:
    """A second copy of the policy, where several local updates need one."""
    trainer, learner = config.trainer, config.learner
    kept = learner.old_logprobs == "anchor" and trainer.local_updates_per_step > 1
    held = parameter_count(model_shape(config, task)) * WEIGHT_BYTES if kept else 0
    return Need(
        "learner.old_logprobs",
        learner.old_logprobs,
        at_least=held,
        at_most=held,
        smaller="model, or use learner.old_logprobs=recompute",
    )


def _engines_need(config: RunConfig, task: Task) -> Need:
    """Engines in processes of their own: each has an interpreter, the weights and a cache."""
    here = config.has_outer_engines and (config.runtime == "local" or config.ray.head() is None)
    count = config.rollout.engines if here else 0
    shape, options = model_shape(config, task), engine_options(config, task)
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * options.max_tokens * options.slots
    held = ENGINE_BYTES + (parameter_count(shape) + cached) * WEIGHT_BYTES
    return Need(
        "rollout.engines",
        config.rollout.engines,
        at_least=count * held,
        at_most=count * held,
        smaller="rollout.engines, rollout.slots or model",
    )


def require_memory(config: RunConfig, task: Task, *, memory: Memory | None = None) -> None:
    """Refuse what cannot fit, however short the answers are.

    Raises:
        ConfigError: Something needs more than the machine has.
    """
    memory = memory or machine_memory()
    for need in step_needs(config, task):
        if need.at_least > memory.total:
            raise ConfigError(
                f"{need.field} = {need.value} needs {need.at_least / _GIB:.1f} GiB or more",
                where="memory",
                rule=f"it is held in memory at once, and there are {memory.total / _GIB:.1f} GiB",
                way_out=f"start a run with a smaller {need.smaller}, or use a machine with more"
                " memory",
            )


def warn_of_memory(
    config: RunConfig, task: Task, events: EventSink, *, memory: Memory | None = None
) -> None:
    """Say if a step may not fit, should every answer be as long as it may be."""
    memory = memory or machine_memory()
    for need in step_needs(config, task):
        if need.at_most > memory.available:
            message = (
                f"{need.field} = {need.value} may need {need.at_most / _GIB:.1f} GiB beside the"
                f" models, {memory.available / _GIB:.1f} GiB are available; if they run out, start"
                f" a run with a smaller {need.smaller}"
            )
            events("warning", {"message": message})


def machine_memory(
    *, limit_files: Iterable[Path] = LIMIT_FILES, available_file: Path = AVAILABLE_FILE
) -> Memory:
    """Memory of this machine, or of the container as far as it says so."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limit_files:
        # "max" or no file: no limit.
        with suppress(OSError, ValueError):
            total = min(total, int(path.read_text()))
    available = total
    with suppress(OSError):
        for line in available_file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = min(total, int(line.split()[1]) * 1024)
    return Memory(total, available)
