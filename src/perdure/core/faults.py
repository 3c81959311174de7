"""Named fault points and plans that strike at them.

Production code calls ``faults.reach(FaultPoint.X)``. In a normal run nothing happens. A
:class:`FaultPlan` says at which hit of which point to fail and how, and counts what fired, so that
a test can assert that its fault took place. The same object serves unit tests, simulation and
``perdure drill``.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class FaultPoint(enum.Enum):
    """Every named place where a run can be made to fail."""

    CLAIM_LINKED = "claim_linked"
    CLAIM_SEALED = "claim_sealed"
    LOG_PAYLOAD_WRITTEN = "log_payload_written"
    LOG_PAYLOAD_FSYNCED = "log_payload_fsynced"
    LOG_CONTROL_WRITTEN = "log_control_written"
    LOG_FSYNCED = "log_fsynced"
    LOG_ACKNOWLEDGED = "log_acknowledged"
    LOG_SEGMENT_OPENED = "log_segment_opened"
    CHECKPOINT_STAGED = "checkpoint_staged"
    SEGMENT_WRITTEN = "segment_written"
    SEGMENTS_DURABLE = "segments_durable"
    CHECKPOINT_FILE_WRITTEN = "checkpoint_file_written"
    CHECKPOINT_FILES_DURABLE = "checkpoint_files_durable"
    MANIFEST_WRITTEN = "manifest_written"
    MANIFEST_RENAMED = "manifest_renamed"
    CHECKPOINT_LOGGED = "checkpoint_logged"
    POINTER_WRITTEN = "pointer_written"
    COLLECT_LOGGED = "collect_logged"
    SEGMENTS_COLLECTED = "segments_collected"
    COLLECTED = "collected"
    WARM_START_STEP = "warm_start_step"
    GROUPS_SUBMITTED = "groups_submitted"
    SESSION_FINISHED = "session_finished"
    BATCH_TAKEN = "batch_taken"
    LOCAL_UPDATE_DONE = "local_update_done"
    STEP_DONE = "step_done"
    WEIGHTS_PUBLISHED = "weights_published"
    EVALUATED = "evaluated"
    RESTORE_STARTED = "restore_started"
    RESTORE_MODEL = "restore_model"
    RESTORE_DONE = "restore_done"
    REDO_STEP = "redo_step"
    REDO_DONE = "redo_done"
    REMOTE_PIECE_STORED = "remote_piece_stored"
    REMOTE_MANIFEST_STORED = "remote_manifest_stored"
    REMOTE_LOG_STORED = "remote_log_stored"
    REMOTE_HEAD_SWAPPED = "remote_head_swapped"
    REMOTE_DROPPED = "remote_dropped"
    REMOTE_FILE_PULLED = "remote_file_pulled"
    STORAGE_TEMPORARY_SYNCED = "storage_temporary_synced"
    STORAGE_RENAMED = "storage_renamed"
    STORAGE_LINKED = "storage_linked"


class FaultHook(Protocol):
    """What production code holds."""

    def reach(self, point: FaultPoint) -> None: ...


class NoFaults:
    """The hook of a normal run."""

    def reach(self, point: FaultPoint) -> None:
        del point


class InjectedFault(Exception):
    """Raised by a rule with action ``raise``."""


class FaultAction(enum.Enum):
    """How a rule fails: SIGKILL to the own process, an exception, or SIGSTOP (a zombie to be)."""

    KILL = "kill"
    RAISE = "raise"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class FaultRule:
    """Fail at the ``hit``-th time (from 1) that ``point`` is reached."""

    point: FaultPoint
    hit: int = 1
    action: FaultAction = FaultAction.KILL


class FaultPlan:
    """A set of rules plus counters of hits and of fired rules. Thread-safe."""

    def __init__(self, rules: Sequence[FaultRule] = ()) -> None:
        self.rules = tuple(rules)
        self.hits: Counter[FaultPoint] = Counter()
        self.fired: list[FaultRule] = []
        self.observers: list[Callable[[FaultPoint], None]] = []
        self._lock = threading.Lock()

    def reach(self, point: FaultPoint) -> None:
        """Count a hit and fail if a rule says so."""
        with self._lock:
            self.hits[point] += 1
            hit = self.hits[point]
            due = [rule for rule in self.rules if rule.point is point and rule.hit == hit]
            self.fired.extend(due)
        for observer in self.observers:
            observer(point)
        for rule in due:
            _strike(rule)

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Parse ``[{"point": "step_done", "hit": 2, "action": "kill"}, …]``."""
        rules = [
            FaultRule(
                FaultPoint(item["point"]),
                int(item.get("hit", 1)),
                FaultAction(item.get("action", "kill")),
            )
            for item in json.loads(text)
        ]
        return cls(rules)


def _strike(rule: FaultRule) -> None:
    if rule.action is FaultAction.RAISE:
        raise InjectedFault(f"{rule.point.value} hit {rule.hit}")
    os.kill(os.getpid(), signal.SIGKILL if rule.action is FaultAction.KILL else signal.SIGSTOP)
