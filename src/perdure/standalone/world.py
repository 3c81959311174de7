"""Where a run lies, who takes part in it, and what they do on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgpack

from perdure.checkpoint import Checkpointer, CheckpointOptions, Choice, Registry
from perdure.checkpoint.arena import spec_of
from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.shares import as_shard
from perdure.checkpoint.team import Team, alone
from perdure.core.clock import Clock
from perdure.core.errors import ConfigError
from perdure.core.events import EventSink, format_event
from perdure.core.faults import FaultHook
from perdure.core.storage_api import Storage
from perdure.runtime.remote import Remote
from perdure.standalone.parts import Progress

_log = logging.getLogger("perdure")
_LOUD = frozenset(
    (
        "warning",
        "checkpoint_damaged",
        "checkpoint_failed",
        "checkpoint_skipped",
        "checkpoint_writer_lost",
        "segment_damaged",
        "remote_failed",
        "remote_fenced",
    )
)


def log_event(name: str, fields: dict[str, object]) -> None:
    """The default sink: a line to the logger ``perdure``, a warning where something went wrong."""
    level = logging.WARNING if name in _LOUD else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, format_event(name, fields))


@dataclass(frozen=True, slots=True)
class World:
    """Where a run lives and what its time, faults and reports are."""

    run_dir: Path
    storage: Storage
    clock: Clock
    faults: FaultHook
    events: EventSink
    remote: Remote | None = None
    team: Team = field(default_factory=alone)


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """What a script goes on from.

    Attributes:
        name: Directory below ``checkpoints/``.
        step: Completed steps.
        skipped: Newer checkpoints that could not be used, with the reason, newest first.
        mismatches: Values kept in two places that did not agree.
    """

    name: str
    step: int
    skipped: tuple[tuple[str, str], ...] = ()
    mismatches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restoring:
    """How a run is opened.

    Attributes:
        take_over: Fence a live process that holds it.
        cold: Parts stored as segments that start without their rows.
        allow_legacy: Whether pickles may be opened.
        regrouped: Parts with a state per rank that may start without one, or leave one behind.
    """

    take_over: bool = False
    cold: tuple[str, ...] = ()
    allow_legacy: bool = False
    regrouped: frozenset[str] = frozenset()


class OpenRun(Protocol):
    """A run that this process takes part in. Made by :func:`open_run`."""

    @property
    def saver(self) -> Checkpointer: ...

    def stage(self, progress: Progress, *, metrics: Mapping[str, float], must: bool) -> bool:
        """Save the present state as that of ``progress.step``; False if no arena was free.

        ``metrics`` say how good the state is.

        Raises:
            ConfigError: A state cannot be stored, or the step was saved before.
            StorageError: ``must`` and it could not be committed.
        """
        ...

    def store_segments(self) -> None:
        """Store what is there of whole segments, if the saver has nothing else to do."""
        ...

    def close(self, reason: str, *, deadline_s: float | None = None) -> None:
        """Wait for pending saves and let the run go.

        Args:
            reason: For the log.
            deadline_s: On the clock's monotonic scale; saves and shipments that have not ended
                then are given up.

        Raises:
            PerdureError: Something could not be made durable. The run is let go all the same.
        """
        ...

    def abandon(self, reason: str, *, deadline_s: float | None = None) -> None:
        """As :meth:`close`, while another error is on its way: failures are reported only."""
        ...


def checkpointer(
    world: World, *, registry: Registry, options: CheckpointOptions, ledger: CommitLedger
) -> Checkpointer:
    """The checkpointer of this rank."""
    return Checkpointer(
        world.storage,
        registry=registry,
        ledger=ledger,
        clock=world.clock,
        faults=world.faults,
        events=world.events,
        options=options,
        team=world.team,
    )


def restore_chosen(
    saver: Checkpointer,
    choice: Choice | None,
    how: Restoring,
    restored: Callable[[Choice | None], None],
) -> None:
    """Load the chosen checkpoint, if there is one, and check what was loaded."""
    if choice is not None:
        saver.restore(choice, cold=how.cold, allow_legacy=how.allow_legacy, regrouped=how.regrouped)
    restored(choice)


def require_storable(registry: Registry) -> None:
    """Learn before the first step, not at the first save, that something cannot be stored."""
    for entry in registry.entries():
        state = entry.component.state()
        try:
            msgpack.packb(dict(state.values))
            for tensor in state.tensors.values():
                held = as_shard(tensor)
                spec_of(tensor if held is None else held.data)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"cannot be saved: {error}",
                where=f"component {entry.name}",
                rule="a checkpoint stores dense tensors of plain number types and small values",
                way_out="convert it before it is registered",
            ) from error
