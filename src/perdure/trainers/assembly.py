"""Builds the parts of one incarnation from its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from perdure.checkpoint import Registry
from perdure.checkpoint.registry import Kind
from perdure.checkpoint.torch_components import RngComponent
from perdure.core.errors import ConfigError
from perdure.core.rollout_api import SamplingParams
from perdure.learner.api import Learner
from perdure.learner.local import LearnerSetup, LocalLearner
from perdure.learner.witness import Truncation
from perdure.models import ModelConfig, Transformer, init_weights, parameter_count
from perdure.publish import (
    InProcessTransport,
    Publication,
    PublicationOptions,
    weights_directory,
)
from perdure.rollout import (
    EmbeddedEngine,
    EngineOptions,
    EnginePool,
    PoolOptions,
    ReplacementOptions,
)
from perdure.runtime.api import Runtime
from perdure.runtime.dispatcher import Dispatcher
from perdure.runtime.fleet import EngineFleet, EngineSource
from perdure.runtime.guest import GuestEngine
from perdure.runtime.local import LocalRuntime, RolloutParts
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.sessions import SessionRules, SessionRunner
from perdure.tasks.api import Task
from perdure.trainers.config import EngineProcessConfig, RunConfig
from perdure.trainers.engine_actors import engine_actors
from perdure.trainers.engine_processes import EngineProcesses
from perdure.trainers.progress import Progress

WEIGHT_BYTES = 4
"""A weight of a model."""

_NO_MEMORY = re.compile(r"memory|overflow", re.IGNORECASE)

LEARNER_KINDS: dict[str, Kind] = {
    "policy": "model",
    "value": "model",
    "reference": "model",
    "optimizer": "optimizer",
    "value_optimizer": "optimizer",
    "scheduler": "scheduler",
    "counters": "counters",
}
"""Kind of each component of the learner: its folder in a checkpoint and its turn in a restore."""


class Machinery(Protocol):
    """Learner and engines of one incarnation, with fresh weights until they are restored."""

    @property
    def learner(self) -> Learner: ...

    def runtime(self, parts: RuntimeParts) -> Runtime:
        """The runtime over a started store."""
        ...

    async def close(self) -> None: ...


MachineryFactory = Callable[[RunConfig, Task], Machinery]
"""Builds the machines of a configuration; another one stands in for them in a simulation."""


@dataclass(frozen=True, slots=True)
class LocalMachinery:
    """A learner in this process, and engines in it or outside.

    Attributes:
        process: How engines outside this process are watched and replaced.
        outside: Where they come from; None: there is one, in this process.
        guest: The learner's devices, lent to engines outside; None: they are not.
        learner_thread: Where the learner of an asynchronous mode works.
        resources: Closed after the pool.
    """

    learner: LocalLearner
    pool: EnginePool
    rules: SessionRules
    process: EngineProcessConfig
    outside: Callable[[RuntimeParts], EngineSource] | None
    guest: Callable[[EnginePool, Publication], GuestEngine] | None
    learner_thread: ThreadPoolExecutor | None
    resources: AsyncExitStack

    def runtime(self, parts: RuntimeParts) -> LocalRuntime:
        sessions = SessionRunner(self.pool, parts=parts, rules=self.rules)
        source = None if self.outside is None else self.outside(parts)
        publication = Publication(
            self.pool,
            InProcessTransport() if source is None else source.transport(),
            incarnation=parts.store.incarnation,
            options=PublicationOptions(acknowledge_timeout_s=self.process.acknowledge_timeout_s),
        )
        fleet = None
        if source is not None:
            self.resources.push_async_callback(source.close)
            replacements = ReplacementOptions(max_replacements=self.process.max_replacements)
            fleet = EngineFleet(
                self.pool, publication, source=source, options=replacements, events=parts.events
            )
        guest = None if self.guest is None else self.guest(self.pool, publication)
        dispatcher = Dispatcher(sessions, max_sessions=lambda: 2 * self.pool.capabilities.slots)
        return LocalRuntime(
            RolloutParts(self.pool, publication, dispatcher, fleet, guest),
            learner=self.learner,
            learner_thread=self.learner_thread,
            events=parts.events,
        )

    async def close(self) -> None:
        async with self.resources:
            await self.pool.close()
            if self.learner_thread is not None:
                self.learner_thread.shutdown()


def build_machinery(config: RunConfig, task: Task) -> LocalMachinery:
    """Model, learner and engine. Initial weights depend on the seed alone.

    Raises:
        ConfigError: There is not enough memory.
    """
    with _fitting_into_memory():
        return _build(config, task)


@contextmanager
def _fitting_into_memory() -> Generator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch says so in words alone.
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        raise ConfigError(
            f"does not fit into memory ({str(error).splitlines()[0] or 'out of memory'})",
            where="model and rollout engine",
            way_out="start a run with a smaller model, rollout.slots or rollout.max_new_tokens,"
            " or use a machine with more memory",
        ) from error


def _build(config: RunConfig, task: Task) -> LocalMachinery:
    shape = model_shape(config, task)
    model = Transformer(shape)
    init_weights(model, config.seed)
    trainer = config.trainer
    setup = LearnerSetup(
        seed=config.seed,
        total_local_updates=trainer.total_steps * trainer.local_updates_per_step,
        local_updates_per_step=trainer.local_updates_per_step,
        temperature=config.rollout.temperature,
        truncation=Truncation(config.rollout.top_k, config.rollout.top_p),
        deterministic=config.deterministic,
    )
    learner = LocalLearner(model, config=config.learner, setup=setup)
    options, resources = engine_options(config, task), AsyncExitStack()
    process = config.rollout.process
    pool = EnginePool(options=PoolOptions(silence_timeout_s=process.token_timeout_s))
    outside = _outside(config, shape, options, resources)
    if outside is None:
        pool.add("embedded", EmbeddedEngine(shape, options))

    def guest(pool: EnginePool, publication: Publication) -> GuestEngine:
        return GuestEngine(
            pool, publication, build=lambda: EmbeddedEngine(shape, options), slots=options.slots
        )

    thread = None if config.mode == "sync" else ThreadPoolExecutor(1, thread_name_prefix="learner")
    return LocalMachinery(
        learner,
        pool,
        session_rules(config, task),
        process,
        outside=outside,
        guest=guest if config.mode == "separate_async" else None,
        learner_thread=thread,
        resources=resources,
    )


def _outside(
    config: RunConfig, shape: ModelConfig, options: EngineOptions, resources: AsyncExitStack
) -> Callable[[RuntimeParts], EngineSource] | None:
    """Where the engines outside this process come from, if the recipe has any."""
    if config.runtime == "ray":
        return lambda parts: engine_actors(config, shape, options, parts)
    if config.mode != "separate_async":
        return None
    held = parameter_count(shape) * WEIGHT_BYTES
    weights_dir = resources.enter_context(weights_directory(held))
    return lambda _: EngineProcesses(shape, options, config.rollout, config.threads, weights_dir)


def model_shape(config: RunConfig, task: Task) -> ModelConfig:
    """The model that answers this task: as many tokens, as long as they can get."""
    return config.model.model_config_for(
        vocab_size=task.tokenizer.vocab_size, max_positions=_longest(config, task)
    )


def engine_options(config: RunConfig, task: Task) -> EngineOptions:
    """Options of the engine that runs it."""
    return EngineOptions(
        slots=config.rollout.slots,
        max_tokens=_longest(config, task),
        deterministic=config.deterministic,
    )


def _longest(config: RunConfig, task: Task) -> int:
    return task.max_prompt_tokens + config.rollout.max_new_tokens


def register_components(machinery: Machinery, progress: Progress) -> Registry:
    """Everything a checkpoint of a run stores."""
    registry = Registry(required=("policy", "optimizer", "progress"))
    for name, component in machinery.learner.components().items():
        registry.register(name, component, kind=LEARNER_KINDS[name])
    registry.register("progress", progress, kind="counters")
    registry.register("rng", RngComponent(), kind="rng")
    return registry


def session_rules(config: RunConfig, task: Task) -> SessionRules:
    """How sessions of training draw their tokens, and how often they are tried."""
    rollout = config.rollout
    sampling = SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=(task.tokenizer.eos_id,),
    )
    loop, tools = config.agent.build()
    return SessionRules(
        sampling,
        config.seed,
        loop=loop,
        tools=tools,
        retries=rollout.session_retries,
        partial_tokens=rollout.partial_tokens,
        continues=rollout.continue_partials and not config.deterministic,
        deterministic=config.deterministic,
        verifier_timeout_s=rollout.verifier_timeout_s,
    )
