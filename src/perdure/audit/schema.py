"""Types of control records, their fields and keys, from the table of ``docs/formats/log.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

OPENED, STARTED, SUBMITTED, SESSION_DONE, SETTLED, PARTIAL, TOOL_RESULT = range(1, 8)
TAKEN, STEP_DONE, REDONE, PUBLISHED, EVICTED, REFILLED, CHECKPOINTED = range(8, 15)
COLLECT, EVALUATED, PHASE_STEP, UPDATE_FAILED, CLOSED = range(15, 20)
_LEDGER = (CHECKPOINTED, EVALUATED, PHASE_STEP, UPDATE_FAILED)
DECISIONS = frozenset((TAKEN, STEP_DONE, REDONE, PUBLISHED, EVICTED, REFILLED, *_LEDGER))
"""Types that a rewind makes void."""

INT, NUMBER, TEXT, BOOL, MAP = "an integer", "a number", "text", "a truth value", "a map"
INTS, TEXTS = "integers", "texts"
PAIR, TRIPLE, QUINTUPLE, OPTIONAL = "2 integers", "3 integers", "5 integers", "optional "

SCHEMAS: Mapping[int, Mapping[str, str]] = {
    STARTED: {
        "incarnation": INT,
        "parent": INT,
        "base_checkpoint": TEXT,
        "base_position": OPTIONAL + TRIPLE,
        "redo_until": OPTIONAL + PAIR,
        "config_digest": TEXT,
    },
    SUBMITTED: {
        "group": INT,
        "submitted_step": INT,
        "sessions": INT,
        "prompt_ids": INTS,
        "task": TEXT,
        "answer": TEXT,
        "dataset_digest": TEXT,
        "data_index": INT,
    },
    SESSION_DONE: {
        "session": PAIR,
        "payload": QUINTUPLE,
        "reward": NUMBER,
        "stop_reason": TEXT,
        "tokens": INT,
        "first_version": INT,
        "last_version": INT,
        "parts": MAP,
    },
    SETTLED: {"group": INT, "outcome": TEXT, "reason": TEXT},
    PARTIAL: {"session": PAIR, "start": INT, "end": INT, "payload": QUINTUPLE},
    TOOL_RESULT: {"session": PAIR, "turn": INT, "call": INT, "tool": TEXT, "result": TEXT},
    TAKEN: {
        "update": PAIR,
        "groups": INTS,
        "config_digest": TEXT,
        "reference_digest": TEXT,
        "tokenizer_digest": TEXT,
    },
    STEP_DONE: {
        "global_step": INT,
        "digest": TEXT,
        "policy_digest": TEXT,
        "optimizer_step": INT,
        "metrics": MAP,
        "timings_s": MAP,
        "skipped": TEXTS,
    },
    REDONE: {"global_step": INT, "digest": TEXT, "equal": BOOL, "incarnation": INT},
    PUBLISHED: {"version": INT, "digest": TEXT, "global_step": INT},
    EVICTED: {"group": INT, "reason": TEXT, "global_step": INT},
    REFILLED: {"group": INT, "replaces": INT},
    CHECKPOINTED: {
        "directory": TEXT,
        "phase": TEXT,
        "step": INT,
        "manifest_digest": TEXT,
        "position": TRIPLE,
    },
    COLLECT: {"directories": TEXTS},
    EVALUATED: {"global_step": INT, "digest": TEXT, "metrics": MAP, "timings_s": MAP},
    PHASE_STEP: {
        "phase": TEXT,
        "step": INT,
        "digest": TEXT,
        "metrics": MAP,
        "timings_s": MAP,
        "final": BOOL,
    },
    UPDATE_FAILED: {"update": PAIR, "incarnation": INT, "error": TEXT},
    CLOSED: {"incarnation": INT, "reason": TEXT},
}
"""Fields of each control type and what they hold."""


def _list_of(kind: type, count: int | None = None) -> Callable[[Any], bool]:
    return lambda value: (
        type(value) is list and count in (None, len(value)) and set(map(type, value)) <= {kind}
    )


_HOLDS: dict[str, Callable[[Any], bool]] = {
    INT: lambda value: type(value) is int,
    NUMBER: lambda value: type(value) in (int, float),
    TEXT: lambda value: type(value) is str,
    BOOL: lambda value: type(value) is bool,
    INTS: _list_of(int),
    TEXTS: _list_of(str),
    MAP: lambda value: type(value) is dict,
    PAIR: _list_of(int, 2),
    TRIPLE: _list_of(int, 3),
    QUINTUPLE: _list_of(int, 5),
}
_CHECKS: dict[int, list[tuple[str, Callable[[Any], bool], bool]]] = {
    type_: [
        (name, _HOLDS[kind.removeprefix(OPTIONAL)], kind.startswith(OPTIONAL))
        for name, kind in schema.items()
    ]
    for type_, schema in SCHEMAS.items()
}


def session_key(session: list[int]) -> str:
    """Text form of a session inside a key."""
    return f"g{session[0]}.s{session[1]}"


def update_key(update: list[int]) -> str:
    """Text form of a local update inside a key."""
    return f"u{update[0]}.{update[1]}"


KEYS: Mapping[int, Callable[[Any], str]] = {
    STARTED: lambda f: f"incarnation/{f['incarnation']}",
    SUBMITTED: lambda f: f"submitted/{f['group']}",
    SESSION_DONE: lambda f: f"session_done/{session_key(f['session'])}",
    SETTLED: lambda f: f"group_settled/{f['group']}",
    PARTIAL: lambda f: f"partial/{session_key(f['session'])}/{f['start']}",
    TOOL_RESULT: lambda f: f"tool_result/{session_key(f['session'])}/{f['turn']}/{f['call']}",
    TAKEN: lambda f: f"taken/{update_key(f['update'])}",
    STEP_DONE: lambda f: f"step_done/{f['global_step']}",
    REDONE: lambda f: f"redone/{f['global_step']}/{f['incarnation']}",
    PUBLISHED: lambda f: f"published/{f['version']}",
    EVICTED: lambda f: f"evicted/{f['group']}",
    REFILLED: lambda f: f"refilled/{f['replaces']}",
    CHECKPOINTED: lambda f: f"checkpointed/{f['directory']}",
    COLLECT: lambda f: f"collect/{','.join(f['directories'])}",
    EVALUATED: lambda f: f"evaluated/{f['global_step']}/{f['digest']}",
    PHASE_STEP: lambda f: f"phase_step/{f['phase']}/{f['step']}",
    UPDATE_FAILED: lambda f: f"update_failed/{update_key(f['update'])}/{f['incarnation']}",
    CLOSED: lambda f: f"closed/{f['incarnation']}",
}


def misfit(type_: int, fields: Mapping[str, Any]) -> str:
    """What is wrong with the fields of a record of a type; empty if nothing is."""
    for name, holds, optional in _CHECKS[type_]:
        value = fields.get(name)
        if not holds(value) and not (optional and value is None):
            return f"field {name} of type {type_} holds {value!r}, not {SCHEMAS[type_][name]}"
    return ""


def canonical(value: object) -> str:
    """The same text for equal values: maps in any order, NaN equal to itself."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {canonical(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(canonical, value))}]"
    return repr(value)
