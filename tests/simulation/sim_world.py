"""A whole run in virtual time: the real trainer, log and checkpoints; fake engines and learner.

Every life of the run ends by a loss of power at a random storage operation, or at the end of the
training. What was acknowledged by then has to be there in the next life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fakes import (
    EngineTraits,
    FakeEngine,
    FakeLearner,
    lengths,
    token_of,
    weights_after,
)
from virtual_loop import Device, run_virtually

from perdure.config import load_config
from perdure.core.clock import Clock, ManualClock
from perdure.core.events import ignore_events
from perdure.core.faults import FaultPlan, FaultPoint
from perdure.core.ids import GroupId, SessionId, UpdateId
from perdure.core.keyed_random import generator
from perdure.core.records import Evaluated, SessionsDone, StepDone
from perdure.core.storage_api import Storage
from perdure.core.trajectories import RewardedGroup
from perdure.experience import ExperienceState, ExperienceStore, read_experience, read_run
from perdure.experience.claims import highest_incarnation, newest_started
from perdure.experience.payloads import PayloadReader
from perdure.experience.reader import read_lineage
from perdure.publish import InProcessTransport, Publication
from perdure.rollout import EnginePool
from perdure.runtime.dispatcher import Dispatcher
from perdure.runtime.local import LocalRuntime
from perdure.runtime.parts import RuntimeParts
from perdure.runtime.sessions import SessionRunner
from perdure.runtime.views import Views
from perdure.storage import CrashMode, MemoryStorage, PowerLost
from perdure.tasks.api import Prompt, RewardResult, Task, judge
from perdure.tasks.config import make_task
from perdure.trainers import launch
from perdure.trainers.assembly import session_rules
from perdure.trainers.config import RunConfig
from perdure.trainers.launch import Injected
from perdure.trainers.recovery import Launch, incarnation

RECIPE = Path(__file__).parents[1] / "drills" / "drill_recipe.yaml"
RUN = Path("simulated-run")


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        crashes: Losses of power before the run may end.
        deaths: Engines killed on the way.
        wrong_digests: Publications that one engine acknowledges wrongly.
    """

    seed: int
    mode: str
    overrides: tuple[str, ...] = ()
    engines: int = 2
    crashes: int = 3
    deaths: int = 0
    wrong_digests: int = 0

    def config(self) -> RunConfig:
        return load_config(
            RunConfig,
            RECIPE,
            [
                f"mode={self.mode}",
                "learner.supervised.steps=0",
                "validation.prompts=0",
                "rollout.max_new_tokens=24",
                *self.overrides,
            ],
        )


@dataclass
class Acknowledged:
    """What some life was told is durable, or acted upon."""

    sessions: set[SessionId] = field(default_factory=set[SessionId])
    taken: dict[UpdateId, tuple[int, ...]] = field(default_factory=dict[UpdateId, tuple[int, ...]])
    steps: dict[int, str] = field(default_factory=dict[int, str])

    def note(self, state: ExperienceState) -> None:
        for group, live in state.groups.items():
            self.sessions.update(SessionId(group, index) for index in live.rewards)
        self.taken.update({update: record.groups for update, record in state.taken.items()})
        self.steps.update({step: record.digest for step, record in state.step_done.items()})

    def check(self, state: ExperienceState) -> None:
        """Assert that nothing of it is gone or different."""
        for update, groups in self.taken.items():
            assert state.taken[update].groups == groups
        for step, digest in self.steps.items():
            assert state.step_done[step].digest == digest  # type: ignore[index]
        for session in self.sessions:
            assert state.table.is_settled(session), session.key()


class World:
    """One scenario, over all its lives."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.config = scenario.config()
        self.rng = generator(scenario.seed, "world")
        self.clock = ManualClock()
        self.storage = MemoryStorage(seed=scenario.seed)
        self.acknowledged = Acknowledged()
        self.task = _task()
        self.deaths = scenario.deaths
        self.lives = 0
        self.learner_s = 0.0
        self.events: list[tuple[str, dict[str, object]]] = []
        self._store: ExperienceStore | None = None
        self._pool: EnginePool | None = None
        self._engines: list[FakeEngine] = []

    def run(self) -> ExperienceState:
        """Live until the training is over; returns the final state, checked."""
        launch.create(self.config, RUN, injected=Injected(self.clock, storage=self.storage))
        while True:
            self.lives += 1
            operations = int(self.rng.integers(5, 400))
            if self.lives <= self.scenario.crashes:
                self.storage.fail_after = self.storage.operations + operations
            try:
                run_virtually(self._life(), self.clock)
                break
            except BaseException as error:
                if not _lost_power(error):
                    raise
                self._store = None
                mode = list(CrashMode)[int(self.rng.integers(len(CrashMode)))]
                self.storage = self.storage.crash(mode, seed=int(self.rng.integers(2**31)))
                if self.storage.exists("log"):
                    state, _ = read_experience(self.storage)
                    state.check()
                    self.acknowledged.check(state)
        return self._final_state()

    async def _life(self) -> None:
        plan = FaultPlan()
        plan.observers.append(self._observe)
        start = Launch(
            RUN,
            self.config,
            self.task,
            self.storage,
            self.clock,
            plan,
            lambda name, fields: self.events.append((name, fields)),
            machinery=lambda config, task: _Machinery(self, config, task),
            views=_no_views,
            threads=False,
        )
        async with asyncio.TaskGroup() as owner:
            others = [owner.create_task(self._commit_now_and_then())]
            if self.deaths:
                others.append(owner.create_task(self._kill_engines()))
            async with incarnation(start) as ctx:
                await launch.MODES[self.config.mode](ctx)
            self._store = None
            for task in others:
                task.cancel()

    def start(self, store: ExperienceStore, pool: EnginePool, engines: list[FakeEngine]) -> None:
        """A runtime is up."""
        self._store, self._pool, self._engines = store, pool, engines

    def device(self) -> Device:
        """The learner's device."""
        return Device(lambda: float(self.rng.uniform(0.5, 3.0)))

    def traits(self) -> EngineTraits:
        """Of a new engine."""
        longest = self.config.rollout.max_new_tokens
        speed = float(self.rng.uniform(0.02, 0.1))
        return EngineTraits(
            token_s=lambda: speed * float(self.rng.uniform(0.5, 2.0)),
            length=lengths(self.scenario.seed, longest),
        )

    def _observe(self, point: FaultPoint) -> None:
        if point is FaultPoint.LOG_ACKNOWLEDGED and self._store is not None:
            # Without threads a commit takes everything that was counted.
            self.acknowledged.note(self._store.state)

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(float(self.rng.uniform(0.01, 1.0)))
            if self._store is not None:
                self._store.commit_all()

    async def _kill_engines(self) -> None:
        while self.deaths:
            await asyncio.sleep(float(self.rng.uniform(0.5, 8.0)))
            alive = [engine for engine in self._engines if not engine.dead]
            if len(alive) > 1:
                alive[int(self.rng.integers(len(alive)))].die()
                self.deaths -= 1

    def _final_state(self) -> ExperienceState:
        state, _ = read_experience(self.storage)
        state.check()
        self.acknowledged.check(state)
        assert state.last_step == self.config.trainer.total_steps
        check_weights(self.storage, state)
        return state


def _lost_power(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_lost_power(one) for one in error.exceptions)
    return isinstance(error, PowerLost)


class _Machinery:
    """Fake machines behind the real runtime."""

    def __init__(self, world: World, config: RunConfig, task: Task) -> None:
        self.learner = FakeLearner()
        self._world = world
        longest = task.max_prompt_tokens + config.rollout.max_new_tokens
        count = world.scenario.engines if config.mode == "separate_async" else 1
        self._engines = [FakeEngine(world.traits(), longest) for _ in range(count)]
        self._engines[-1].traits.wrong_digests = world.scenario.wrong_digests
        self._pool = EnginePool({f"engine-{i}": e for i, e in enumerate(self._engines)})

    def runtime(self, parts: RuntimeParts) -> LocalRuntime:
        config = self._world.config
        sessions = SessionRunner(self._pool, parts=parts, rules=session_rules(config, parts.task))
        self._world.start(parts.store, self._pool, self._engines)
        return LocalRuntime(
            pool=self._pool,
            publication=Publication(
                self._pool, InProcessTransport(), incarnation=parts.store.incarnation
            ),
            dispatcher=Dispatcher(sessions, max_sessions=24),
            learner=self.learner,
            learner_thread=None if config.mode == "sync" else self._world.device(),
            events=parts.events,
        )

    async def close(self) -> None:
        await self._pool.close()


def check_weights(storage: Storage, state: ExperienceState) -> None:
    """Assert that the final weights come from the taken batches alone, each token from its version.

    Every group is trained once at most, and the digest chain over the logged batches, in order, is
    the digest that the log ends with.
    """
    rows = _settled_rows(storage)
    reader = PayloadReader(storage)
    weights = [0.0, 0.0]
    trained: list[int] = []
    for update, record in state.taken.items():
        groups = [_logged_group(reader, rows[group], group) for group in record.groups]
        for group in groups:
            _check_tokens(group)
        trained += record.groups
        weights = weights_after(weights, update, groups)
    assert len(trained) == len(set(trained))
    last = state.step_done[state.last_step]
    learner = FakeLearner()
    learner.set(weights)
    assert learner.policy_digest() == last.policy_digest


_Rows = dict[int, tuple[SessionsDone, int]]


def _settled_rows(storage: Storage) -> dict[int, _Rows]:
    """Group → session index → the first record that settled it, and its row."""
    rows: dict[int, _Rows] = {}
    newest = highest_incarnation(storage)
    head = newest_started(storage, run_id=read_run(storage).run_id, below=newest + 1)
    for _, record in read_lineage(storage, head).records:
        if isinstance(record, SessionsDone):
            for row, session in enumerate(record.sessions):
                rows.setdefault(session.group, {}).setdefault(session.index, (record, row))
    return rows


def _logged_group(reader: PayloadReader, rows: _Rows, group: int) -> RewardedGroup:
    trajectories = []
    rewards = []
    for index, (record, row) in sorted(rows.items()):
        session = SessionId(GroupId(group), index)
        trajectories.append(reader.trajectory(record.payload, row=row, session=session))
        rewards.append(record.rewards[row])
    return RewardedGroup(group, tuple(trajectories), tuple(rewards))


def _check_tokens(group: RewardedGroup) -> None:
    for one in group.trajectories:
        one.check()
        key = (7, one.session.group, one.session.index)
        for segment in one.segments:
            expected = [
                token_of(key, t, segment.version) for t in range(segment.start, segment.end)
            ]
            assert one.response_ids_T[segment.start : segment.end].tolist() == expected


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
    """A task whose verifier finds about half of all answers right."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> object:
        return getattr(self._task, name)

    def verify(self, prompt: Prompt, response_ids: Sequence[int]) -> RewardResult:
        del prompt
        return judge(sum(response_ids) % 2 == 0)


@cache
def _task() -> Task:
    config = Scenario(0, "sync").config()
    return _Judge(make_task(config.task, config.seed))  # type: ignore[return-value]
