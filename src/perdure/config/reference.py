"""What there is to set, read off the sections themselves: for messages, comments and the docs."""

from __future__ import annotations

import json
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from perdure.config import yaml_text

_WIDTH = 96
_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a recipe.

    Attributes:
        key: Dotted name.
        kind: What it takes, with the bounds of numbers.
        default: As it is written in a recipe; None if it has to be given.
        text: What it means; may be empty.
    """

    key: str
    kind: str
    default: str | None
    text: str


@dataclass(frozen=True, slots=True)
class SectionReference:
    """A section and the settings that lie directly in it."""

    key: str
    text: str
    settings: tuple[Setting, ...]


def sections(
    model: type[BaseModel], *, key: str = "", default: BaseModel | None = None
) -> Iterator[SectionReference]:
    """The section ``model`` and all below it, outer ones first.

    Args:
        model: The section.
        key: Its dotted name.
        default: What it is when the recipe is silent; its values, not the class's, are defaults.
    """
    prefix = f"{key}." if key else ""
    inner: list[tuple[str, type[BaseModel], BaseModel | None]] = []
    settings: list[Setting] = []
    for name, info in model.model_fields.items():
        value: Any = info.default if default is None else getattr(default, name)
        below = section_classes(info.annotation)
        given = value if isinstance(value, BaseModel) else None
        inner += [(f"{prefix}{name}", cls, given) for cls in below]
        if not below:
            setting = describe(info, f"{prefix}{name}")
            settings.append(setting if default is None else replace(setting, default=_text(value)))
    yield SectionReference(key, _about(model), tuple(settings))
    for name, cls, given in inner:
        yield from sections(cls, key=name, default=given)


def section_classes(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation allows."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [cls for arg in typing.get_args(annotation) for cls in section_classes(arg)]


def describe(info: FieldInfo, key: str) -> Setting:
    """One field as a setting."""
    kind = _kind(info.annotation, info.metadata)
    return Setting(key, kind, _default(info), _prose(info.description))


def find(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    """The field at a dotted path, through optional sections and lists of sections too."""
    classes = [model]
    info: FieldInfo | None = None
    for name in path:
        found = [cls.model_fields[name] for cls in classes if name in cls.model_fields]
        if name.isdigit():
            continue
        if not found:
            return None
        info = found[0]
        classes = section_classes(info.annotation)
    return info


def explained(config: BaseModel, *, leave_out: Collection[str] = ()) -> str:
    """The configuration as YAML with a comment above every setting; loads to an equal one.

    Args:
        config: A resolved configuration.
        leave_out: Dotted names of sections that are not shown.
    """
    return "".join(_explained(config, prefix="", leave_out=leave_out))


def _explained(config: BaseModel, *, prefix: str, leave_out: Collection[str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, info in type(config).model_fields.items():
        key, value = f"{prefix}{name}", getattr(config, name)
        if key in leave_out:
            continue
        if isinstance(value, BaseModel):
            yield f"\n{_comment(_about(type(value)), indent)}{indent}{name}:\n"
            yield from _explained(value, prefix=f"{key}.", leave_out=leave_out)
        else:
            setting = describe(info, key)
            about = f"{setting.text} " if setting.text else ""
            yield _comment(f"{about}({setting.kind})", indent)
            yield textwrap.indent(yaml_text.render({name: to_jsonable_python(value)}), indent)


def _about(model: type[BaseModel]) -> str:
    return _prose(model.__doc__)


def _prose(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _comment(text: str, indent: str) -> str:
    lead = f"{indent}# "
    lines = textwrap.wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=lead)
    return "".join(f"{line}\n" for line in lines)


def _default(info: FieldInfo) -> str | None:
    value: Any = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return None
    return _text(value)


def _text(value: Any) -> str:
    return yaml_text.render({"": to_jsonable_python(value)}).partition(":")[2].strip()


def _kind(annotation: Any, metadata: Sequence[Any]) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0], [*_bounds_in(arguments[1:]), *metadata])
    if origin is typing.Literal:
        return _one_of([json.dumps(choice).replace('"', "'") for choice in arguments])
    if origin in (typing.Union, types.UnionType):
        named = ["null" if arg is type(None) else _kind(arg, metadata) for arg in arguments]
        return _one_of(list(dict.fromkeys(named)))
    if origin in (tuple, list):
        return "list"
    if origin is dict:
        return "mapping"
    bounds = [f"{words} {getattr(m, at)}" for m in metadata for at, words in _BOUNDS if _has(m, at)]
    steps = [f"a multiple of {m.multiple_of}" for m in metadata if _has(m, "multiple_of")]
    return ", ".join([_PLAIN.get(annotation, "text"), *bounds, *steps])


def _bounds_in(metadata: Sequence[Any]) -> Iterator[Any]:
    """Bounds of a nested annotation: pydantic unpacks only those of the field itself."""
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _has(bound: Any, name: str) -> bool:
    return getattr(bound, name, None) is not None


def _one_of(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
