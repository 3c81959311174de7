"""The options of a script's engine, looked at before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from perdure.checkpoint import Migrations
from perdure.checkpoint.image_files import WriterKind
from perdure.core.clock import Clock
from perdure.core.errors import ConfigError
from perdure.core.events import EventSink
from perdure.core.faults import FaultHook
from perdure.core.names import hint
from perdure.core.storage_api import Storage
from perdure.standalone.policy import SavePolicy

Check = Callable[[dict[str, Any]], object]
"""A sanity check: gets copies of the registered objects by name; False or an exception refuses."""

GRACE_S = 30.0
RANK_TIMEOUT_S = 600.0


class EngineOptions(TypedDict, total=False):
    """What few scripts need.

    Attributes:
        take_over: Fence a live process that holds the run (one that hangs, say).
        accept_changes: Names of optimizers and schedules whose settings the script has changed on
            purpose: its own win over the stored ones. Of other parts: the check after loading is
            left out, and of those that every rank has for itself the ranks may be more or fewer.
        process_group: Of ``torch.distributed``: its ranks save together, each its part of what is
            spread over them, with one commit. Any number of ranks may load that.
        rank_timeout_s: Longest wait for another rank (600): as far as ranks may be apart.
        cold: Names of parts stored as segments (a ``ReplayRing``) that start without their rows.
        allow_legacy: Parts added with ``legacy=True`` may be unpickled: it runs code they name.
        migrations: Turn stored parts of an older ``schema_version`` into the next.
        sanity: Called after restoring with copies of all registered objects; returning False or
            raising refuses to go on.
        arenas: Copies of the state that fit into memory beside it: 2, or 1 on tight hosts.
        writer: Who writes: a ``process`` of its own, a ``thread``, or by size (``auto``).
        grace_s: After SIGTERM, seconds from the signal within which the save must be durable;
            leaving the loop waits for nothing any longer.
        must_timeout_s: Longest wait for the save of the last step, and for saves that are still
            being written when the loop ends (600).
        stall_timeout_s: A writer process without a sign of life for so long is replaced (120).
        events: Receives every event; the logger ``perdure`` by default.
        clock, faults, storage: For tests.
    """

    take_over: bool
    accept_changes: Iterable[str]
    process_group: Any
    rank_timeout_s: float
    cold: Iterable[str]
    allow_legacy: bool
    migrations: Migrations
    sanity: Check
    arenas: Literal[1, 2]
    writer: WriterKind
    grace_s: float
    must_timeout_s: float
    stall_timeout_s: float
    events: EventSink
    clock: Clock
    faults: FaultHook
    storage: Storage


def require_valid(
    options: Mapping[str, Any], *, save: object, required: object, listed: Iterable[str]
) -> None:
    """Refuse what would be noticed only when it is needed, hours later.

    Args:
        options: Those given.
        save: When to save, or None.
        required: Names.
        listed: Names of the engine's other arguments, for the hint at a misspelt option.

    Raises:
        ConfigError: An option that does not exist, or a value that it cannot have.
    """
    for name in options:
        if name not in EngineOptions.__annotations__:
            known = (*EngineOptions.__annotations__, *listed)
            raise _refused(name, "is not an option", "options are known by name", hint(name, known))
    if not isinstance(save, SavePolicy | None):
        way_out = "write save=every(steps=2000, minutes=20)"
        raise _refused("save", f"is {save!r}", "made by every(…)", way_out)
    names = {"required": required, **{key: options.get(key) for key in ("accept_changes", "cold")}}
    for name, value in names.items():
        if isinstance(value, str):
            rule = "a list of names: a text would be taken letter by letter"
            raise _refused(name, f"is {value!r}", rule, f"write {name}=[{value!r}]")
    for name, usual_s in (("grace_s", GRACE_S), ("rank_timeout_s", RANK_TIMEOUT_S)):
        value = options.get(name, usual_s)
        if not isinstance(value, int | float) or not (value >= 0 and math.isfinite(value)):
            way_out = f"leave it out: {usual_s:g} s"
            raise _refused(name, f"is {value!r}", "seconds, 0 or more", way_out)


def _refused(where: str, what: str, rule: str, way_out: str) -> ConfigError:
    return ConfigError(what, where=where, rule=rule, way_out=way_out)
