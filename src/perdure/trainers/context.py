"""What every trainer loop and step function works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from perdure.checkpoint import Checkpointer
from perdure.core.clock import Clock
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.core.ids import PolicyVersion, UpdateId
from perdure.core.trajectories import RewardedGroup
from perdure.experience import ExperienceStore, RunInfo
from perdure.learner.api import LocalUpdateResult
from perdure.runtime.api import Runtime
from perdure.runtime.views import CurveView, MetricsView
from perdure.tasks.api import Prompt, Task
from perdure.trainers.config import RunConfig
from perdure.trainers.mismatch_watch import MismatchWatch
from perdure.trainers.progress import Progress
from perdure.trainers.signal_watch import SignalWatch
from perdure.trainers.stopping import StopRequest


@dataclass(slots=True)
class TrainContext:
    """One incarnation of a run. The mode loop is the only writer of ``progress``."""

    config: RunConfig
    config_digest: str
    run: RunInfo
    task: Task
    store: ExperienceStore
    runtime: Runtime
    checkpoints: Checkpointer
    metrics: MetricsView
    curve: CurveView
    clock: Clock
    faults: FaultHook
    events: EventSink
    stop: StopRequest
    signal: SignalWatch
    mismatch: MismatchWatch
    progress: Progress
    held_out: list[Prompt]
    distrusted: frozenset[str]
    """Checkpoint directories that failed verification in this incarnation."""
    rows_upto: int
    """Highest global step whose row is in the metrics files."""
    last_checkpoint_s: float
    """Monotonic time of the last staging (of the start, before the first)."""
    staged: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Phase and step of what this incarnation has staged."""
    step_groups: list[RewardedGroup] = field(default_factory=list[RewardedGroup])
    """Groups trained so far in the step in progress."""
    step_updates: list[LocalUpdateResult] = field(default_factory=list[LocalUpdateResult])
    step_version: PolicyVersion | None = None
    """Version of the weights that the step in progress began with; None if they were never
    published, and before its first local update."""
    timings_s: dict[str, float] = field(default_factory=dict[str, float])
    activity: str = "bookkeeping"
    """What the loop is doing or waits for; ``bookkeeping`` between activities."""
    activity_since_s: float = 0.0
    """Monotonic time at which that began."""
    awaited_groups: int = 0
    """Finished groups that the loop waits for; 0 while it does not."""

    def __post_init__(self) -> None:
        self.activity_since_s = self.clock.monotonic_s()

    @property
    def groups_per_update(self) -> int:
        trainer = self.config.trainer
        return trainer.train_batch_size // trainer.local_updates_per_step

    def taken_beyond(self, step: int) -> list[UpdateId]:
        """Updates of later steps whose batch is logged, in training order."""
        newest_first: list[UpdateId] = []
        for update in reversed(self.store.state.taken):
            if update.global_step <= step:
                break
            newest_first.append(update)
        return newest_first[::-1]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the body's wall-clock seconds to ``timings_s[name]`` of the step in progress."""
        started_s = self.clock.monotonic_s()
        try:
            with self.doing(name):
                yield
        finally:
            seconds = self.clock.monotonic_s() - started_s
            self.timings_s[name] = self.timings_s.get(name, 0.0) + seconds

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Say what the body does, for whoever asks why nothing moves."""
        outer = self.activity
        self.activity, self.activity_since_s = activity, self.clock.monotonic_s()
        try:
            yield
        finally:
            self.activity, self.activity_since_s = outer, self.clock.monotonic_s()

    @contextmanager
    def awaiting(self, groups: int) -> Iterator[None]:
        """The body waits for so many finished groups."""
        self.awaited_groups = groups
        try:
            yield
        finally:
            self.awaited_groups = 0

    def begin_step(self) -> None:
        """Forget what belongs to the step that ended."""
        self.step_groups.clear()
        self.step_updates.clear()
        self.step_version = None
        self.timings_s.clear()
