"""A whole run in virtual time: the real trainer, log and checkpoints; fake engines and learner.

Every life of the run but the last ends in one of the ways of :class:`scenarios.Ending`. What was
acknowledged by then has to be there in the next life.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fakes import (
    ACKNOWLEDGE_TIMEOUT_S,
    SLOTS,
    CopyTransport,
    EngineTraits,
    FakeEngine,
    FakeLearner,
    lengths,
    paces,
)
from logged_batches import Acknowledged
from mischief import DIED, DIED_ASKED, DISK_FAULTS, HUNG, RAISED, WEDGED, Witness
from scenarios import Ending, Scenario
from sim_checks import check_counts, check_reasons, check_tools, check_weights
from sim_tools import Outside, with_tools
from virtual_loop import Device, run_virtually

from perdure.core.clock import Clock, ManualClock
from perdure.core.errors import StorageError, TrainingError
from perdure.core.events import ignore_events
from perdure.core.faults import FaultPlan, FaultPoint
from perdure.core.keyed_random import generator
from perdure.core.records import Evaluated, StepDone
from perdure.core.rollout_api import RolloutEngine
from perdure.core.storage_api import Storage
from perdure.experience import ExperienceState, ExperienceStore, read_experience
from perdure.publish import Publication, WeightTransport
from perdure.rollout import EnginePool
from perdure.rollout.members import MemberState
from perdure.rollout.options import ReplacementOptions
from perdure.runtime.dispatcher import Dispatcher
from perdure.runtime.fleet import EngineFleet
from perdure.runtime.guest import GuestEngine
from perdure.runtime.local import LocalRuntime, RolloutParts
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.sessions import SessionRules, SessionRunner
from perdure.runtime.views import Views
from perdure.storage import CrashMode, MemoryStorage, PowerLost
from perdure.storage.faulty import FaultyStorage, StorageFault
from perdure.tasks.api import Prompt, RewardResult, Task, judge
from perdure.tasks.config import make_task
from perdure.trainers import launch
from perdure.trainers.assembly import session_rules
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected
from perdure.trainers.recovery import Launch, incarnation

RUN = Path("simulated-run")
MAX_LIVES = 20
_EXPLAINED: dict[Ending, type[BaseException]] = {
    Ending.POWER: PowerLost,
    Ending.KILL: PowerLost,
    Ending.STOP: asyncio.CancelledError,
    Ending.DISK: StorageError,
}


class World:
    """One scenario, over all its lives.

    Attributes:
        witness: What has taken place.
        outside: What tools have done.
        slots: Of an engine.
    """

    slots = SLOTS

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.config = scenario.config()
        self.rng = generator(scenario.seed, "world")
        self.clock = ManualClock()
        self.storage = MemoryStorage(seed=scenario.seed)
        self.acknowledged = Acknowledged()
        self.task = _task()
        self.witness = self.task.witness = Witness()
        self.task.failing, self.task.hanging = scenario.failing, scenario.hanging
        self.outside = Outside(lambda key: key in self.acknowledged.results, self.witness)
        self.deaths = scenario.deaths
        self.deaths_asked = scenario.deaths_asked
        self.wedges = scenario.wedges
        self.events: list[tuple[str, dict[str, object]]] = []
        self._store: ExperienceStore | None = None
        self._pool: EnginePool | None = None
        self.engines: dict[str, FakeEngine] = {}

    def run(self) -> ExperienceState:
        """Live until the training is over; returns the final state, checked."""
        launch.create(self.config, RUN, injected=Injected(self.clock, storage=self.storage))
        for life in range(1, MAX_LIVES + 1):
            self.outside.new_life()
            endings = self.scenario.endings[life - 1 :]
            ending = endings[0] if endings else None
            storage, stop_after_s = self._prepare(ending)
            try:
                run_virtually(self._life(life, storage, stop_after_s), self.clock)
                break
            except BaseException as error:
                if not _explained(error, ending):
                    raise
                self.witness.ended(ending if _stood_for(error, ending) else None)
            finally:
                self._store = None
                if isinstance(storage, FaultyStorage):
                    self.witness.struck(storage.fired)
            self._outlive(ending)
        else:
            raise AssertionError(f"the run is not over after {MAX_LIVES} lives")
        return self._final_state()

    def _prepare(self, ending: Ending | None) -> tuple[Storage, float | None]:
        """The storage of the next life, and when it is asked to stop."""
        operations = int(self.rng.integers(5, 400))
        match ending:
            case Ending.POWER | Ending.KILL:
                self.storage.fail_after = self.storage.operations + operations
            case Ending.STOP:
                return self.storage, float(self.rng.uniform(0.1, 60.0))
            case Ending.DISK:
                kinds = self.rng.choice(len(DISK_FAULTS), 3)
                plan = [
                    StorageFault(DISK_FAULTS[kind], int(self.rng.integers(1, 150)))
                    for kind in kinds
                ]
                seed = int(self.rng.integers(2**31))
                return FaultyStorage(self.storage, plan=plan, seed=seed, clock=self.clock), None
            case None:
                self.storage.fail_after = None
        return self.storage, None

    def _outlive(self, ending: Ending | None) -> None:
        """What the next life finds; everything acknowledged has to be there."""
        if ending is Ending.POWER:
            mode = list(CrashMode)[int(self.rng.integers(len(CrashMode)))]
            self.storage = self.storage.crash(mode, seed=int(self.rng.integers(2**31)))
        else:
            self.storage = self.storage.process_kill()
        if self.storage.exists("log"):
            state, _ = read_experience(self.storage)
            state.check()
            self.acknowledged.check(state)

    async def _life(self, life: int, storage: Storage, stop_after_s: float | None) -> None:
        plan = FaultPlan()
        plan.observers.append(self._observe)
        start = Launch(
            RUN,
            self.config,
            self.task,
            storage,
            self.clock,
            plan,
            self.on_event,
            redo=life not in self.scenario.rewinds,
            machinery=lambda config, task: _Machinery(self, config, task),
            views=_no_views,
            threads=False,
        )
        with start.stop.listening():
            start.stop.attach()
            async with asyncio.TaskGroup() as owner:
                others = [
                    owner.create_task(work)
                    for work in (
                        self._commit_now_and_then(),
                        self._trouble_engines(),
                        _stop_after(stop_after_s),
                    )
                ]
                async with incarnation(start) as ctx:
                    await launch.MODES[self.config.mode](ctx)
                for task in others:
                    task.cancel()

    def start(self, store: ExperienceStore, pool: EnginePool) -> None:
        """A runtime is up."""
        self._store, self._pool = store, pool

    def device(self) -> Device | None:
        """The learner's device; None: its work takes no time."""
        if self.config.mode == "sync":
            return None
        return Device(lambda: float(self.rng.uniform(0.5, 3.0)))

    def agent(self, pool: EnginePool) -> RolloutEngine:
        """What sessions are run on."""
        return pool

    def rules(self, rules: SessionRules) -> SessionRules:
        """How sessions are run."""
        kind = self.scenario.tools
        if kind is None:
            return rules
        return with_tools(rules, self.outside, rng=self.rng, kind=kind)

    def engine(self) -> FakeEngine:
        """A new engine."""
        scenario, longest = self.scenario, self.config.rollout.max_new_tokens
        speed = float(self.rng.uniform(0.02, 0.1))
        traits = EngineTraits(
            token_s=lambda: speed * float(self.rng.uniform(0.5, 2.0)),
            length=lengths(scenario.seed, longest),
            pace=paces(scenario.seed, scenario.slow),
            load_s=lambda: (
                ACKNOWLEDGE_TIMEOUT_S + 0.3 * float(self.rng.pareto(0.7))
                if self.rng.random() < scenario.late
                else speed
            ),
            dies_asked=self._dies_asked,
        )
        return FakeEngine(
            traits,
            self.task.max_prompt_tokens + longest,
            witness=self.witness,
            on_late=self._require_quarantined,
        )

    def _dies_asked(self) -> bool:
        if not self.deaths_asked or self.rng.random() > 0.3:
            return False
        self.deaths_asked -= 1
        self.witness.seen[DIED_ASKED] += 1
        return True

    def _require_quarantined(self, engine: FakeEngine) -> None:
        """It acknowledges after the deadline: until then it is left out, and everybody told."""
        assert self._pool is not None
        (name,) = [name for name, one in self._pool.takers.items() if one is engine]
        (report,) = [member for member in self._pool.describe() if member.name == name]
        left_out = report.state is MemberState.QUARANTINED
        self.witness.require(left_out, f"{report} is late and was not left out")

    async def start_engine(self, name: str) -> FakeEngine:
        """A new engine in a while."""
        await asyncio.sleep(float(self.rng.uniform(0.1, 5.0)))
        is_new, self.engines[name] = name not in self.engines, self.engine()
        if is_new:
            self.garble(name)
        return self.engines[name]

    def garble(self, name: str) -> None:
        """One of several engines acknowledges wrongly, for so long."""
        if name == "engine-0" and self.scenario.engines > 1:
            self.engines[name].traits.wrong_digests = self.scenario.wrong_digests

    def on_event(self, name: str, fields: dict[str, object]) -> None:
        """The run says something."""
        self.events.append((name, fields))
        self.witness.event(name)
        if name == "rewound":
            # What was trained or finished beyond the checkpoint is void from here on.
            self.acknowledged = Acknowledged()

    def _observe(self, point: FaultPoint) -> None:
        if point is FaultPoint.LOG_ACKNOWLEDGED and self._store is not None:
            # Without threads a commit takes everything that was counted.
            self.acknowledged.note(self._store.state)

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(float(self.rng.uniform(0.01, 1.0)))
            if self._store is not None:
                self._store.commit_all()

    async def _trouble_engines(self) -> None:
        """Kill and wedge engines; without replacement one is left alone."""
        while self.deaths or self.wedges:
            await asyncio.sleep(float(self.rng.uniform(0.5, 8.0)))
            assert self._pool is not None
            serving = {m.name for m in self._pool.describe() if m.state is MemberState.SERVING}
            well = [e for name, e in self.engines.items() if name in serving and not e.wedged]
            if len(well) <= (0 if self.scenario.replaced else 1):
                continue
            victim = well[int(self.rng.integers(len(well)))]
            if self.deaths:
                self.deaths -= 1
                self.witness.seen[DIED] += 1
                victim.die()
            else:
                self.wedges -= 1
                self.witness.seen[WEDGED] += 1
                victim.wedge()

    def _final_state(self) -> ExperienceState:
        state, _ = read_experience(self.storage)
        state.check()
        self.acknowledged.check(state)
        assert state.last_step == self.config.trainer.total_steps
        check_counts(state, self.config)
        check_weights(self.storage, state)
        assert not self.witness.wrong
        self.witness.evicted(state.table.evictions)
        check_reasons(self.storage)
        continues = self.config.rollout.continue_partials
        check_tools(self.storage, self.task.tokenizer, continues=continues)
        return state


async def _stop_after(seconds: float | None) -> None:
    """Ask the process to stop as its operator would."""
    if seconds is not None:
        await asyncio.sleep(seconds)
        signal.raise_signal(signal.SIGTERM)


def _explained(error: BaseException, ending: Ending | None) -> bool:
    """Whether the life was to end so, or no engine was left that takes weights."""
    if isinstance(error, BaseExceptionGroup):
        return any(_explained(one, ending) for one in error.exceptions)
    if isinstance(error, TrainingError):
        return "no engine acknowledged" in error.what
    return _stood_for(error, ending)


def _stood_for(error: BaseException, ending: Ending | None) -> bool:
    """Whether the life was to end so."""
    if isinstance(error, BaseExceptionGroup):
        return any(_stood_for(one, ending) for one in error.exceptions)
    return ending is not None and isinstance(error, _EXPLAINED[ending])


class _Machinery:
    """Fake machines behind the real runtime."""

    def __init__(self, world: World, config: RunConfig, task: Task) -> None:
        del task
        self.learner = FakeLearner()
        self._world = world
        self._separate = config.mode == "separate_async"
        scenario = world.scenario
        count = scenario.engines if self._separate else scenario.shared_engines
        self._names = [f"engine-{i}" for i in range(count)]
        world.engines = {} if scenario.replaced else {name: world.engine() for name in self._names}
        if self._separate and not scenario.replaced:
            world.garble("engine-0")
        self._pool = EnginePool(world.engines)

    def runtime(self, parts: RuntimeParts) -> LocalRuntime:
        world, pool = self._world, self._pool
        rules = world.rules(session_rules(world.config, parts.task))
        sessions = SessionRunner(world.agent(pool), parts=parts, rules=rules)
        publication = Publication(pool, CopyTransport(), incarnation=parts.store.incarnation)
        world.start(parts.store, pool)
        guest = fleet = None
        if self._separate:
            guest = GuestEngine(pool, publication, build=world.engine, slots=world.slots)
        if world.scenario.replaced:
            fleet = EngineFleet(
                pool,
                publication,
                source=_Engines(world, self._names),
                options=ReplacementOptions(),
                events=parts.events,
            )
        dispatcher = Dispatcher(sessions, max_sessions=lambda: 2 * pool.capabilities.slots)
        return LocalRuntime(
            RolloutParts(pool, publication, dispatcher, fleet, guest),
            learner=self.learner,
            learner_thread=world.device(),
            events=parts.events,
        )

    async def close(self) -> None:
        await self._pool.close()


class _Engines:
    """Fake engines that take a while to come."""

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self.names = names
        self.start = world.start_engine

    def transport(self) -> WeightTransport:
        return CopyTransport()

    async def watch(self) -> None:
        """They stand on nothing that could go."""

    async def close(self) -> None:
        """The pool has closed them."""


class _NoMetrics:
    def rebuild(self, *, steps: Iterable[StepDone], evaluations: Iterable[Evaluated]) -> None:
        del steps, evaluations

    def step(self, record: StepDone) -> None:
        del record

    def evaluation(self, record: Evaluated) -> None:
        del record


class _NoCurve:
    def refresh(self) -> bool:
        return False


@contextmanager
def _no_views(run_dir: Path, storage: Storage, clock: Clock) -> Generator[Views]:
    del run_dir, storage, clock
    yield Views(ignore_events, _NoMetrics(), _NoCurve(), lambda: 0)


class _Judge:
    """A task whose verifier finds about half of all answers right, and raises at some."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.failing = self.hanging = 0.0
        self.witness = Witness()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    async def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        digest = generator(0, "verdict", prompt.data_index, *response_ids)
        if digest.random() < self.failing:
            self.witness.seen[RAISED] += 1
            raise ValueError("the verifier has no answer")
        if digest.random() < self.hanging:
            self.witness.seen[HUNG] += 1
            await asyncio.Event().wait()
        return judge(sum(response_ids) % 2 == 0)


@cache
def _task() -> Any:
    config = Scenario(0, "sync").config()
    return _Judge(make_task(config.task, config.seed))
