"""One canonical line per unit of work: ``name key=value …`` with the fixed fields declared here."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

FIELDS = MappingProxyType(
    {
        "run_started": ("run", "incarnation", "task"),
        "run_finished": ("run", "incarnation", "global_step", "digest"),
        "run_ended": ("reason",),
        "claimed": ("incarnation", "parent", "took_over"),
        "log_tail_cut": ("incarnation", "stream", "segment", "bytes", "why"),
        "log_committed": ("records", "bytes", "fsync_ms"),
        "checkpoint_staged": ("step", "blocked_ms", "bytes"),
        "checkpoint_committed": ("step", "name", "write_ms", "bytes"),
        "checkpoint_skipped": ("step", "reason"),
        "checkpoint_writer_lost": ("reason", "replacement"),
        "checkpoint_failed": ("step", "name", "error"),
        "checkpoint_damaged": ("name", "file", "reason"),
        "checkpoint_collected": ("names",),
        "segments_stored": ("segments", "bytes", "write_ms"),
        "segment_damaged": ("file", "reason"),
        "checkpoint_shipped": ("step", "name", "bytes", "seconds"),
        "log_shipped": ("bytes",),
        "remote_failed": ("error",),
        "remote_fenced": ("error",),
        "pulled": ("name", "bytes", "seconds"),
        "restored": ("name", "step"),
        "rewound": ("name", "step", "void_to_step", "groups"),
        "groups_abandoned": ("groups",),
        "redo_started": ("from_step", "to_step"),
        "redone": ("global_step", "digest", "equal"),
        "redo_finished": ("local_updates", "seconds"),
        "warm_start_again": ("logged_step",),
        "warm_start_step": ("step",),
        "warm_start": ("step", "loss", "seconds"),
        "step": ("global_step", "reward", "seconds"),
        "engine_quarantined": ("engine", "reason"),
        "session_retried": ("session", "reason"),
        "published": ("version", "digest", "seconds"),
        "waiting": ("what", "seconds"),
        "engine_found": ("engine", "pid"),
        "engine_lost": ("engine", "reason"),
        "engine_replaced": ("engine", "seconds"),
        "engine_not_replaced": ("engine", "reason"),
        "spillover": ("global_step", "lend", "reason"),
        "learner_returned": ("global_step", "seconds", "switch_s"),
        "evaluated": ("global_step", "accuracy", "seconds"),
        "warning": ("message",),
    }
)
"""Event name → its required fields, in the order they are printed."""

EventSink = Callable[[str, dict[str, object]], None]
"""Receives ``(name, fields)``; ``ignore_events`` drops them."""


def format_event(name: str, fields: dict[str, object]) -> str:
    """One line, declared fields first. ``KeyError``: the name is unknown or a field is missing."""
    declared = FIELDS[name]
    parts = [f"{key}={_text(fields[key])}" for key in declared]
    parts += [f"{key}={_text(value)}" for key, value in fields.items() if key not in declared]
    return " ".join([name, *parts])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def ignore_events(name: str, fields: dict[str, object]) -> None:
    """A sink for callers that do not listen."""
    del name, fields
