"""What everything that runs in one incarnation stands on."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.core.clock import Clock
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.experience import ExperienceStore
from perdure.tasks.api import Task


@dataclass(frozen=True, slots=True)
class RuntimeParts:
    """A started store, the task, and what is a parameter everywhere."""

    store: ExperienceStore
    task: Task
    clock: Clock
    faults: FaultHook
    events: EventSink
