"""The base of every configuration section, and what can be said of a configured run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_jsonable_python

from perdure.config import yaml_text
from perdure.core.digests import digest_values


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a configuration cannot be honoured, in four parts.

    Attributes:
        field: Dotted name; relative to the section that reports it.
        value: The offending value as text.
        rule: What has to hold, e.g. ``must be a multiple of mini_batch_size (16)``.
        way_out: What to set instead; in ``set name=value`` the name is relative too.
        reads: Other dotted fields the rule looked at; a problem is not reported when one of them
            is itself wrong.
    """

    field: str
    value: str
    rule: str
    way_out: str
    reads: tuple[str, ...] = ()

    def sentence(self) -> str:
        return f"{self.field} = {self.value}: {self.rule}; way out: {self.way_out}"


class Section(BaseModel):
    """Frozen settings that lie beside what they set; unknown keys and loose types are refused.

    Bounds of one field belong into its annotation (``Annotated[int, Field(gt=0)]``); rules over
    several fields belong into :meth:`problems`, so that all of them are reported at once.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    file_fields: ClassVar[tuple[str, ...]] = ()
    """Dotted names of fields that name files, in the root section of a recipe.

    The loader makes them absolute: those of the recipe start at its directory, those of the command
    line at the working directory. Where a file lies is left out of :func:`config_digest`; what it
    holds is for its reader to digest.
    """

    def problems(self) -> Iterable[Problem]:
        """Broken rules over several fields of this section; the loader asks, pydantic does not."""
        return ()


@dataclass(frozen=True, slots=True)
class _Operational:
    """Marks a field that does not change what a run computes."""


OPERATIONAL: Final = _Operational()
"""``Annotated[int, OPERATIONAL]``: the field or section is left out of :func:`config_digest`."""


@dataclass(frozen=True, slots=True)
class DigestedAs:
    """Marks a field that does not change what a run computes and yet is part of the digest.

    It is from a time when it had one value. Older runs have that in their digest, and so it enters
    every digest.

    Attributes:
        value: What enters, whatever the field is set to.
    """

    value: str


def config_digest(config: Section) -> str:
    """xxh3-128 hex of everything in ``config`` that affects arithmetic."""
    value = _arithmetic(config)
    for field in type(config).file_fields:
        section, name = parent_of(value, field)
        if section is not None:
            section.pop(name, None)
    return digest_values(value)


def parent_of(data: object, field: str) -> tuple[dict[str, Any] | None, str]:
    """The mapping inside nested ``data`` that a dotted field lies in, if it is there; its name."""
    *sections, name = field.split(".")
    node = data
    for section in sections:
        node = cast("dict[str, Any]", node).get(section) if isinstance(node, dict) else None
    return (cast("dict[str, Any]", node) if isinstance(node, dict) else None), name


def render_yaml(config: Section, *, leave_out: Collection[str] = ()) -> str:
    """The resolved configuration as a recipe that loads to an equal one.

    Args:
        config: The configuration.
        leave_out: Dotted names of what has its default and is not shown.
    """
    data = config.model_dump(mode="json")
    for field in leave_out:
        section, name = parent_of(data, field)
        if section is not None:
            section.pop(name, None)
    return yaml_text.render(data)


def _arithmetic(value: object) -> object:
    if isinstance(value, Section):
        fields = type(value).model_fields
        arithmetic = {
            name: _arithmetic(getattr(value, name))
            for name, info in fields.items()
            if OPERATIONAL not in info.metadata
        }
        for name, info in fields.items():
            for mark in info.metadata:
                if isinstance(mark, DigestedAs):
                    arithmetic[name] = mark.value
        return arithmetic
    if isinstance(value, tuple):
        return [_arithmetic(item) for item in cast("tuple[object, ...]", value)]
    return to_jsonable_python(value)
