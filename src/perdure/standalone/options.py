"""What few scripts need to set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict

from perdure.checkpoint import Migrations
from perdure.checkpoint.image_files import WriterKind
from perdure.core.clock import Clock
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.core.storage_api import Storage

Check = Callable[[dict[str, Any]], object]
"""A sanity check: gets copies of the registered objects by name; False or an exception refuses."""


class EngineOptions(TypedDict, total=False):
    """What few scripts need.

    Attributes:
        take_over: Fence a live process that holds the run (one that hangs, say).
        accept_changes: Names of optimizers and schedules whose settings the script has changed on
            purpose: its own win over the stored ones. Of other parts: the check after loading is
            left out.
        cold: Names of parts stored as segments (a ``ReplayRing``) that start without their rows.
        allow_legacy: Parts added with ``legacy=True`` may be unpickled: it runs code they name.
        migrations: Turn stored parts of an older ``schema_version`` into the next.
        sanity: Called after restoring with copies of all registered objects; returning False or
            raising refuses to go on.
        arenas: Copies of the state that fit into memory beside it: 2, or 1 on tight hosts.
        writer: Who writes: a ``process`` of its own, a ``thread``, or by size (``auto``).
        grace_s: After SIGTERM, seconds from the signal within which the save must be durable.
        events: Receives every event; the logger ``perdure`` by default.
        clock, faults, storage: For tests.
    """

    take_over: bool
    accept_changes: Iterable[str]
    cold: Iterable[str]
    allow_legacy: bool
    migrations: Migrations
    sanity: Check
    arenas: Literal[1, 2]
    writer: WriterKind
    grace_s: float
    events: EventSink
    clock: Clock
    faults: FaultHook
    storage: Storage
