"""Records to and from msgpack-able fields. Their byte layout is in ``docs/formats/log.md``."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import typing
from collections.abc import Callable
from typing import Any

from perdure.core.ids import (
    GlobalStep,
    GroupId,
    LocalUpdate,
    LogPosition,
    PayloadRef,
    SessionId,
    UpdateId,
)
from perdure.core.records import ControlRecord

_CLASSES: dict[int, type[Any]] = {cls.type: cls for cls in typing.get_args(ControlRecord)}
_Convert = Callable[[Any], Any]
_MEMBER_VALUE = operator.attrgetter("_value_")
"""``value`` of an enumeration's member, without the descriptor that makes it slow."""


def record_fields(record: ControlRecord) -> dict[str, object]:
    """The msgpack-able fields of a record: ids as lists, enums by value."""
    return {
        name: getattr(record, name) if encode is None else encode(getattr(record, name))
        for name, encode, _ in _codec(type(record))
    }


def record_from_fields(type_number: int, fields: dict[str, Any]) -> ControlRecord:
    """Rebuild a record. Unknown fields are ignored (added by a later minor version).

    Raises:
        ValueError: The type is unknown or a field is missing or of the wrong shape.
    """
    try:
        cls = _CLASSES[type_number]
        return cls(
            **{
                name: fields[name] if decode is None else decode(fields[name])
                for name, _, decode in _codec(cls)
                if name in fields
            }
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a valid record of type {type_number}: {error}") from error


@functools.cache
def _codec(cls: type[Any]) -> tuple[tuple[str, _Convert | None, _Convert | None], ...]:
    """Name, encoder and decoder (None: as it is) of every field; type hints are slow to read."""
    hints = typing.get_type_hints(cls)
    return tuple((f.name, *_converters(hints[f.name])) for f in dataclasses.fields(cls))


def _converters(hint: Any) -> tuple[_Convert | None, _Convert | None]:
    options = typing.get_args(hint)
    if type(None) in options:
        encode, decode = _converters(next(o for o in options if o is not type(None)))
        return _unless_none(encode), _unless_none(decode)
    if typing.get_origin(hint) is tuple:
        return _each(*_converters(options[0]))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _MEMBER_VALUE, {member.value: member for member in hint}.__getitem__
    if hint is SessionId:
        return _session_list, _session_from
    if hint is UpdateId:
        return _update_list, _update_from
    if hint in (LogPosition, PayloadRef):
        names = [f.name for f in dataclasses.fields(hint)]
        return lambda value: [getattr(value, name) for name in names], lambda value: hint(*value)
    return None, None


def _unless_none(convert: _Convert | None) -> _Convert | None:
    if convert is None:
        return None
    return lambda value: None if value is None else convert(value)


def _each(encode: _Convert | None, decode: _Convert | None) -> tuple[_Convert, _Convert]:
    """Converters of a tuple of any length."""
    return (
        list if encode is None else lambda value: list(map(encode, value)),
        tuple if decode is None else lambda value: tuple(map(decode, value)),
    )


def _session_list(session: SessionId) -> list[int]:
    return [session.group, session.index]


def _session_from(value: Any) -> SessionId:
    return SessionId(GroupId(value[0]), value[1])


def _update_list(update: UpdateId) -> list[int]:
    return [update.global_step, update.local_update]


def _update_from(value: Any) -> UpdateId:
    return UpdateId(GlobalStep(value[0]), LocalUpdate(value[1]))
