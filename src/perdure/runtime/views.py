"""What people see of a run: its events, its metrics, its curve. None of it is needed to go on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from perdure.core.clock import Clock
from perdure.core.events import EventSink
from perdure.core.records import Evaluated, StepDone
from perdure.core.storage_api import Storage
from perdure.runtime.curves import CurveFile
from perdure.runtime.live_file import LiveFile
from perdure.runtime.metrics_files import STEPS_PATH, EventsFile, MetricsFiles, read_rows


class MetricsView(Protocol):
    """Rows of steps and evaluations, as they are acknowledged."""

    def rebuild(self, *, steps: Iterable[StepDone], evaluations: Iterable[Evaluated]) -> None:
        """Begin again with these; comes before anything else."""
        ...

    def step(self, record: StepDone) -> None: ...

    def evaluation(self, record: Evaluated) -> None: ...


class CurveView(Protocol):
    """A picture of the metrics."""

    def refresh(self) -> bool:
        """Draw it again unless that was done a moment ago; whether it was."""
        ...


@dataclass(frozen=True, slots=True)
class Views:
    """The views of one incarnation.

    Attributes:
        last_step_shown: Highest global step that the metrics of earlier incarnations show, 0 if
            none; raises ``DamagedError`` if they cannot be read.
        live: Told now and then how things stand; None: nobody asks.
    """

    events: EventSink
    metrics: MetricsView
    curve: CurveView
    last_step_shown: Callable[[], int]
    live: Callable[[Mapping[str, object]], None] | None = None


ViewsFactory = Callable[[Path, Storage, Clock], AbstractContextManager[Views]]
"""Opens the views of a run directory for the length of a body."""


@contextmanager
def file_views(run_dir: Path, storage: Storage, clock: Clock) -> Generator[Views]:
    """``events.jsonl``, ``metrics/``, ``tensorboard/`` and ``curve.png``."""
    with ExitStack() as stack:
        events = EventsFile(run_dir, clock=clock)
        stack.callback(events.close)
        metrics = stack.enter_context(MetricsFiles(run_dir, storage=storage, clock=clock))
        shown = partial(last_step_shown, run_dir)
        live = LiveFile(run_dir).write
        yield Views(events, metrics, CurveFile(run_dir, clock=clock), shown, live)


def last_step_shown(run_dir: Path) -> int:
    """Highest global step in the metrics files; 0 if there is none.

    Raises:
        DamagedError: A line of them is no row.
    """
    rows = read_rows(run_dir / STEPS_PATH)
    return int(str(rows[-1]["global_step"])) if rows else 0
