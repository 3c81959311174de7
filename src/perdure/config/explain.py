"""From a pydantic error to a problem in four parts, with the nearest valid name."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from perdure.config.reference import describe, find, section_classes
from perdure.config.section import Problem, Section
from perdure.core.names import hint, nearest

_ABSENT = "(absent)"


def problem_of(model_cls: type[Section], data: dict[str, Any], detail: dict[str, Any]) -> Problem:
    """The four-part form of one pydantic error detail about ``data``."""
    path = _path(data, detail)
    field = ".".join(path)
    kind = detail["type"]
    if kind == "missing":
        return Problem(field, _ABSENT, "is required", f"add {field} to the recipe")
    value = _shown(detail["input"])
    message = str(detail["msg"]).removeprefix("Value error, ").replace("Input should be ", "")
    if kind == "extra_forbidden":
        return Problem(field, value, "unknown key", _key_hint(model_cls, path, detail["input"]))
    if kind in ("literal_error", "enum"):
        choices = [part.strip("'") for part in message.replace(" or ", ", ").split(", ")]
        only = f"set {field}={choices[0]}, or leave it out" if len(choices) == 1 else None
        way_out = only or hint(str(detail["input"]), choices)
        return Problem(field, value, f"must be {message}", way_out)
    if kind == "value_error":
        rule, _, way_out = message.partition("; ")
        return Problem(field, value, rule, way_out or _way_to_set(model_cls, path))
    rule = "is a section" if kind == "model_type" else f"must be {_lower(message)}"
    return Problem(field, value, rule, _way_to_set(model_cls, path))


def _way_to_set(model_cls: type[Section], path: Sequence[str]) -> str:
    """What a field takes, with an example; of a section, the settings in it."""
    field = ".".join(path)
    info = find(model_cls, path)
    if info is None:
        return f"correct {field}"
    inner = [
        f"{field}.{name}" for cls in section_classes(info.annotation) for name in cls.model_fields
    ]
    if inner:
        return f"set what lies in it: {', '.join(inner[:3])}{', …' if len(inner) > 3 else ''}"
    setting = describe(info, field)
    example = "" if setting.default is None else f", for example {field}={setting.default}"
    return f"set it to {setting.kind}{example}"


def _path(data: Any, detail: dict[str, Any]) -> list[str]:
    """The error's location without the tags that pydantic adds for unions."""
    path: list[str] = []
    node = data
    location = detail["loc"]
    for depth, part in enumerate(location):
        last_missing = detail["type"] == "missing" and depth == len(location) - 1
        if isinstance(node, dict) and part in node:
            node = typing.cast("dict[str, Any]", node)[part]
        elif isinstance(node, list) and isinstance(part, int):
            items = typing.cast("list[Any]", node)
            node = items[part] if part < len(items) else None
        elif not last_missing:
            continue
        path.append(str(part))
    return path


def _key_hint(model_cls: type[Section], path: list[str], value: object) -> str:
    *parents, name = path
    fields = {k: v for cls in _sections_at(model_cls, parents) for k, v in cls.model_fields.items()}
    sections = [key for key, info in fields.items() if section_classes(info.annotation)]
    # What holds settings of its own was meant to be a section.
    close = (isinstance(value, dict) and nearest(name, sections)) or nearest(name, fields)
    if close:
        return f"did you mean {'.'.join([*parents, close])!r}?"
    elsewhere = {dotted.split(".")[-1]: dotted for dotted in reversed(list(_dotted(model_cls)))}
    close = nearest(name, elsewhere)
    if close is not None:
        return f"did you mean {elsewhere[close]!r}?"
    return f"use one of: {', '.join('.'.join([*parents, field]) for field in sorted(fields))}"


def _sections_at(model_cls: type[BaseModel], parents: Sequence[str]) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = [model_cls]
    for name in parents:
        infos = [cls.model_fields[name] for cls in found if name in cls.model_fields]
        if infos:
            found = [cls for info in infos for cls in section_classes(info.annotation)]
    return found


def _dotted(model_cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model_cls.model_fields.items():
        yield f"{prefix}{name}"
        for section in section_classes(info.annotation):
            yield from _dotted(section, f"{prefix}{name}.")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
