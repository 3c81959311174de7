"""Types of records, their fields and keys, from the table of ``docs/formats/log.md``."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OPENED, STARTED, SUBMITTED, SESSIONS_DONE, SETTLED, PARTIALS, TOOL_RESULT = range(1, 8)
TAKEN, STEP_DONE, REDONE, PUBLISHED, EVICTED, REFILLED, CHECKPOINTED = range(8, 15)
COLLECT, EVALUATED, PHASE_STEP, UPDATE_FAILED, CLOSED, RESTARTED = range(15, 21)
TRAJECTORIES, PARTIAL_TOKENS = 101, 102
_LEDGER = (CHECKPOINTED, EVALUATED, PHASE_STEP, UPDATE_FAILED)
DECISIONS = frozenset((TAKEN, STEP_DONE, REDONE, PUBLISHED, EVICTED, REFILLED, *_LEDGER))
"""Types that a rewind makes void."""

INT, NUMBER, TEXT, BOOL, MAP = "an integer", "a number", "text", "a truth value", "a map"
INTS, NUMBERS, TEXTS, NUMBER_MAPS = "integers", "numbers", "texts", "maps of numbers"
PAIRS, TRIPLE_LISTS = "lists of 2 integers", "lists of lists of 3 integers"
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
    SESSIONS_DONE: {
        "sessions": PAIRS,
        "rewards": NUMBERS,
        "stop_reasons": TEXTS,
        "tokens": INTS,
        "first_versions": INTS,
        "last_versions": INTS,
        "parts": NUMBER_MAPS,
        "payload": QUINTUPLE,
    },
    SETTLED: {"group": INT, "outcome": TEXT, "reason": TEXT},
    PARTIALS: {
        "sessions": PAIRS,
        "attempts": INTS,
        "starts": INTS,
        "ends": INTS,
        "first_versions": INTS,
        "last_versions": INTS,
        "payload": QUINTUPLE,
    },
    TOOL_RESULT: {
        "session": PAIR,
        "attempt": INT,
        "turn": INT,
        "call": INT,
        "tool": TEXT,
        "result": TEXT,
        "arguments": OPTIONAL + TEXT,
    },
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
    REDONE: {
        "global_step": INT,
        "digest": TEXT,
        "equal": BOOL,
        "incarnation": INT,
        "metrics": MAP,
        "timings_s": MAP,
    },
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
    RESTARTED: {"session": PAIR, "attempt": INT, "reason": TEXT},
    TRAJECTORIES: {
        "sessions": PAIRS,
        "prompt_tokens": INTS,
        "response_tokens": INTS,
        "segments": TRIPLE_LISTS,
        "stop_reasons": TEXTS,
    },
    PARTIAL_TOKENS: {
        "sessions": PAIRS,
        "attempts": INTS,
        "starts": INTS,
        "ends": INTS,
        "segments": TRIPLE_LISTS,
    },
}
"""Fields of each type and what they hold."""

ROW_COLUMNS: Mapping[int, Sequence[str]] = {
    SESSIONS_DONE: (
        "rewards",
        "stop_reasons",
        "tokens",
        "first_versions",
        "last_versions",
        "parts",
    ),
    PARTIALS: ("attempts", "starts", "ends", "first_versions", "last_versions"),
}
"""What a row of a record with rows says of its session."""

COLUMNS: Mapping[int, Sequence[str]] = {
    SESSIONS_DONE: ("sessions", *ROW_COLUMNS[SESSIONS_DONE]),
    PARTIALS: ("sessions", *ROW_COLUMNS[PARTIALS]),
    PARTIAL_TOKENS: ("sessions", "attempts", "starts", "ends", "segments"),
    TRAJECTORIES: ("sessions", "prompt_tokens", "response_tokens", "segments", "stop_reasons"),
}
"""Fields with one element per row."""


def _list_of(*kinds: type, count: int | None = None) -> Callable[[Any], bool]:
    allowed = set(kinds)
    return lambda value: (
        type(value) is list and count in (None, len(value)) and set(map(type, value)) <= allowed
    )


def _list_where(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(holds, value))


def _is_number_map(value: Any) -> bool:
    return (
        type(value) is dict
        and set(map(type, value)) <= {str}
        and set(map(type, value.values())) <= {int, float}
    )


_HOLDS: dict[str, Callable[[Any], bool]] = {
    INT: lambda value: type(value) is int,
    NUMBER: lambda value: type(value) in (int, float),
    TEXT: lambda value: type(value) is str,
    BOOL: lambda value: type(value) is bool,
    INTS: _list_of(int),
    NUMBERS: _list_of(int, float),
    TEXTS: _list_of(str),
    MAP: lambda value: type(value) is dict,
    NUMBER_MAPS: _list_where(_is_number_map),
    PAIR: _list_of(int, count=2),
    PAIRS: _list_where(_list_of(int, count=2)),
    TRIPLE: _list_of(int, count=3),
    TRIPLE_LISTS: _list_where(_list_where(_list_of(int, count=3))),
    QUINTUPLE: _list_of(int, count=5),
}
_CHECKS: dict[int, list[tuple[str, Callable[[Any], bool], bool]]] = {
    type_: [
        (name, _HOLDS[kind.removeprefix(OPTIONAL)], kind.startswith(OPTIONAL))
        for name, kind in schema.items()
    ]
    for type_, schema in SCHEMAS.items()
}


def session_key(session: Sequence[int]) -> str:
    """Text form of a session inside a key."""
    return f"g{session[0]}.s{session[1]}"


def partial_key(fields: Mapping[str, Any], row: int) -> str:
    """Session, attempt and first token of a row inside a key."""
    session, attempt, start = (fields[name][row] for name in ("sessions", "attempts", "starts"))
    return f"{session_key(session)}/{attempt}/{start}"


def update_key(update: list[int]) -> str:
    """Text form of a local update inside a key."""
    return f"u{update[0]}.{update[1]}"


KEYS: Mapping[int, Callable[[Any], str]] = {
    STARTED: lambda f: f"incarnation/{f['incarnation']}",
    SUBMITTED: lambda f: f"submitted/{f['group']}",
    SESSIONS_DONE: lambda f: f"sessions_done/{session_key(f['sessions'][0])}",
    SETTLED: lambda f: f"group_settled/{f['group']}",
    PARTIALS: lambda f: f"partials/{partial_key(f, 0)}",
    TOOL_RESULT: lambda f: (
        f"tool_result/{session_key(f['session'])}/{f['attempt']}/{f['turn']}/{f['call']}"
    ),
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
    RESTARTED: lambda f: f"session_restarted/{session_key(f['session'])}/{f['attempt']}",
}
"""What the key in a record's header follows from; one with rows counts by them instead."""


def misfit(type_: int, fields: Mapping[str, Any]) -> str:
    """What is wrong with the fields of a record of a type; empty if nothing is."""
    for name, holds, optional in _CHECKS[type_]:
        value = fields.get(name)
        if not holds(value) and not (optional and value is None):
            held = reprlib.repr(value)
            return f"field {name} of type {type_} holds {held}, not {SCHEMAS[type_][name]}"
    return _rows_misfit(fields, COLUMNS[type_]) if type_ in COLUMNS else ""


def _rows_misfit(fields: Mapping[str, Any], columns: Sequence[str]) -> str:
    sessions: list[list[int]] = fields["sessions"]
    if not sessions:
        return "it has no rows"
    for name in columns:
        if len(fields[name]) != len(sessions):
            return f"{len(fields[name])} {name} for {len(sessions)} sessions"
    seen = set[tuple[int, ...]]()
    for session in map(tuple, sessions):
        if session in seen:
            return f"{session_key(session)} has two rows"
        seen.add(session)
    return ""


def canonical(value: object) -> str:
    """The same text for equal values: maps in any order, NaN equal to itself."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {canonical(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(canonical, value))}]"
    return repr(value)
