"""Events as people read them on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

Fields = Mapping[str, object]

_DIGEST_SHOWN = 10
"""Characters of a digest that are enough to compare two by eye."""


def sentence(name: str, fields: Fields) -> str | None:
    """One line for an event; None for those that people are not told of."""
    write = _SENTENCES.get(name)
    return None if write is None else write(fields)


def _run_started(fields: Fields) -> str:
    plan = ""
    if "total_steps" in fields:
        plan = f", {fields['total_steps']} global steps"
        if fields.get("warm_start_steps"):
            plan += f" after a warm start of {fields['warm_start_steps']}"
    return f"run {fields['run']}: {fields['task']}{plan}"


def _claimed(fields: Fields) -> str | None:
    if not fields["parent"]:
        return None
    how = ", fencing off the process that held it" if fields["took_over"] is True else ""
    return f"goes on as incarnation {fields['incarnation']}{how}"


def _tail_cut(fields: Fields) -> str:
    return (
        f"{_bytes(fields['bytes'])} of {fields['why']} appends were cut from the"
        f" {fields['stream']} log of incarnation {fields['incarnation']}; nobody was told that"
        " they are durable"
    )


def _committed(fields: Fields) -> str:
    seconds = _float(fields["write_ms"]) / 1000
    return f"checkpoint {fields['name']} saved: {_bytes(fields['bytes'])} in {seconds:.2f} s"


def _warm_start_again(fields: Fields) -> str:
    logged = f"; its log reaches step {step}" if (step := fields["logged_step"]) else ""
    return f"no checkpoint was saved before: the warm start begins again{logged}"


def _rewound(fields: Fields) -> str:
    step, last = fields["step"], fields["void_to_step"]
    if step == last:
        return f"goes on from step {step}; nothing was trained beyond it"
    first = int(str(step)) + 1
    return f"steps {_span(first, last)} are void, their {fields['groups']} groups are given up"


def _redone(fields: Fields) -> str:
    verdict = "equal" if fields["equal"] is True else "[bold red]DIFFERS from the log[/]"
    return f"step {fields['global_step']:>5}  redone {_short(fields['digest'])}  {verdict}"


def _waiting(fields: Fields) -> str:
    seconds = _float(fields["seconds"])
    return f"waits for {fields['what']}{f', for {seconds:.0f} s now' if seconds else ''}"


def _finished(fields: Fields) -> str:
    return f"finished at step {fields['global_step']}, state {_short(fields['digest'])}"


def _span(first: object, last: object) -> str:
    return str(last) if first == last else f"{first}–{last}"


def _short(digest: object) -> str:
    return str(digest)[:_DIGEST_SHOWN]


def _float(value: object) -> float:
    return float(str(value))


def _bytes(count: object) -> str:
    amount = _float(count)
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


_SENTENCES: Mapping[str, Callable[[Fields], str | None]] = MappingProxyType(
    {
        "run_started": _run_started,
        "run_finished": _finished,
        "claimed": _claimed,
        "log_tail_cut": _tail_cut,
        "checkpoint_committed": _committed,
        "checkpoint_skipped": lambda f: f"checkpoint of step {f['step']} skipped: {f['reason']}",
        "checkpoint_damaged": lambda f: (
            f"checkpoint {f['name']} is damaged: {f['file']}: {f['reason']}"
        ),
        "checkpoint_failed": lambda f: f"checkpoint {f['name']} failed: {f['error']}",
        "checkpoint_shipped": lambda f: (
            f"checkpoint {f['name']} shipped: {_bytes(f['bytes'])} in {_float(f['seconds']):.1f} s"
        ),
        "remote_failed": lambda f: f"the remote tier is behind: {f['error']}",
        "remote_fenced": lambda f: f"nothing is shipped any more: {f['error']}",
        "pulled": lambda f: f"checkpoint {f['name']} fetched: {_bytes(f['bytes'])}",
        "restored": lambda f: f"checkpoint {f['name']} loaded",
        "rewound": _rewound,
        "groups_abandoned": lambda f: (
            f"{f['groups']} groups of weights that no longer exist are replaced"
        ),
        "redo_started": lambda f: f"redoing steps {_span(f['from_step'], f['to_step'])} of the log",
        "redone": _redone,
        "redo_finished": lambda f: (
            f"redone {f['local_updates']} local updates in {_float(f['seconds']):.1f} s"
        ),
        "warm_start": lambda f: (
            f"warm start step {f['step']:>5}  loss {_float(f['loss']):.3f}"
            f"  {_float(f['seconds']):.1f} s"
        ),
        "warm_start_again": _warm_start_again,
        "engine_lost": lambda f: f"{f['engine']} is lost: {f['reason']}",
        "engine_replaced": lambda f: (
            f"{f['engine']} is replaced after {_float(f['seconds']):.1f} s"
        ),
        "engine_not_replaced": lambda f: f"{f['engine']} is not replaced: {f['reason']}",
        "engine_quarantined": lambda f: (
            f"{f['engine']} gets no traffic until it has the new weights: {f['reason']}"
        ),
        "waiting": _waiting,
        "warning": lambda f: f"warning: {f['message']}",
    }
)
