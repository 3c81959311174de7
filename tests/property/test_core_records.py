"""Every record survives its fields being packed and read back; keys name what they should."""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from pathlib import Path
from typing import Any

import experience_records as make
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.experience_records import Partials, SessionsDone
from perdure.core.ids import GroupId, LogPosition, PayloadRef, SessionId, UpdateId
from perdure.core.record_codec import record_fields, record_from_fields
from perdure.core.record_types import DECISION_TYPES, EvictionReason, RecordType, StopReason
from perdure.core.records import ControlRecord, Evicted

CLASSES: tuple[type[Any], ...] = typing.get_args(ControlRecord)
_COUNTS = st.integers(0, 2**63 - 1)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_FLOATS = st.floats(allow_nan=False)
_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: _COUNTS,
    str: _TEXT,
    bool: st.booleans(),
    float: _FLOATS,
    dict[str, float]: st.dictionaries(_TEXT, _FLOATS, max_size=3),
    tuple[int, ...]: st.lists(_COUNTS, max_size=4).map(tuple),
    tuple[str, ...]: st.lists(_TEXT, max_size=4).map(tuple),
    SessionId: st.builds(SessionId, _COUNTS, _COUNTS),
    UpdateId: st.builds(UpdateId, _COUNTS, _COUNTS),
    LogPosition: st.builds(LogPosition, _COUNTS, _COUNTS, _COUNTS),
    PayloadRef: st.builds(
        PayloadRef, _COUNTS, _COUNTS, _COUNTS, _COUNTS, st.integers(0, 2**64 - 1)
    ),
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    hint = getattr(hint, "__supertype__", hint)
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    inner = next(option for option in typing.get_args(hint) if option is not type(None))
    return st.none() | _values(inner)


def _records(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    if cls is SessionsDone:
        return st.integers(1, 3).flatmap(lambda rows: _columns(hints, rows))
    if cls is Partials:
        return st.lists(_SIMPLE[SessionId], min_size=1, max_size=3, unique=True).flatmap(_partials)
    return st.builds(cls, **{f.name: _values(hints[f.name]) for f in dataclasses.fields(cls)})


def _columns(hints: dict[str, Any], rows: int) -> st.SearchStrategy[SessionsDone]:
    """Records of settled sessions with so many rows."""
    columns = {
        f.name: st.lists(_values(typing.get_args(hints[f.name])[0]), min_size=rows, max_size=rows)
        for f in dataclasses.fields(SessionsDone)
        if f.name != "payload"
    }
    made = {name: column.map(tuple) for name, column in columns.items()}
    return st.builds(SessionsDone, **made, payload=_SIMPLE[PayloadRef])


def _partials(sessions: list[SessionId]) -> st.SearchStrategy[Partials]:
    """Records of partial tokens of these sessions."""

    def column(values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(values, min_size=len(sessions), max_size=len(sessions)).map(tuple)

    numbers = column(_COUNTS)
    return st.builds(
        lambda starts, lengths, **others: Partials(
            sessions=tuple(sessions),
            starts=starts,
            ends=tuple(map(sum, zip(starts, lengths, strict=True))),
            **others,
        ),
        numbers,
        column(st.integers(1, 2**40)),
        attempts=numbers,
        first_versions=numbers,
        last_versions=numbers,
        payload=_SIMPLE[PayloadRef],
    )


ANY_RECORD = st.sampled_from(CLASSES).flatmap(_records)


def _packed(record: Any) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.packb(record_fields(record)))


@given(record=ANY_RECORD)
def test_a_record_reads_back_from_its_packed_fields(record: Any) -> None:
    assert record_from_fields(record.type, _packed(record)) == record


@given(record=ANY_RECORD)
def test_unknown_fields_of_a_later_version_are_ignored(record: Any) -> None:
    assert record_from_fields(record.type, {**_packed(record), "later": [1]}) == record


@given(record=ANY_RECORD, data=st.data())
def test_a_missing_field_is_refused_or_has_its_default(record: Any, data: st.DataObject) -> None:
    fields = _packed(record)
    gone = data.draw(st.sampled_from(sorted(fields)))
    del fields[gone]
    field = next(f for f in dataclasses.fields(record) if f.name == gone)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        with pytest.raises(ValueError, match="not a valid record"):
            record_from_fields(record.type, fields)
    else:
        record_from_fields(record.type, fields)


@given(record=ANY_RECORD)
def test_a_key_is_text_that_names_its_type(record: Any) -> None:
    kind = record.key().split("/")[0]
    assert kind in {record.type.name.lower(), "segment", "incarnation"}
    assert record.key() == record_from_fields(record.type, _packed(record)).key()


@given(first=ANY_RECORD, second=ANY_RECORD)
def test_records_of_two_types_never_share_a_key(first: Any, second: Any) -> None:
    if first.type is not second.type:
        assert first.key() != second.key()


@pytest.mark.parametrize("number", [0, 99, 101, 102, 103, -1])
def test_numbers_without_a_control_record_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match=r"not a valid record|not a valid RecordType"):
        record_from_fields(number, {})


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (SessionsDone, "sessions", 3),
        (SessionsDone, "sessions", [[1]]),
        (SessionsDone, "sessions", []),
        (SessionsDone, "sessions", [[1, 0], [1, 1]]),
        (SessionsDone, "payload", [1, 2]),
        (SessionsDone, "stop_reasons", ["unheard of"]),
        (SessionsDone, "rewards", []),
        (Partials, "sessions", []),
        (Partials, "sessions", [[1, 0], [1, 0]]),
        (Partials, "attempts", [0]),
        (Partials, "starts", [0, 7]),
        (Partials, "starts", [-1, 3]),
        (Partials, "ends", [4, 3]),
        (Evicted, "reason", 7),
    ],
)
def test_a_field_of_the_wrong_shape_is_refused(cls: type[Any], name: str, value: object) -> None:
    ref = PayloadRef(*[typing.cast("Any", 1)] * 5)
    session = SessionId(GroupId(1), 0)
    whole: dict[type[Any], Any] = {
        SessionsDone: SessionsDone(
            (session,),
            (1.0,),
            (StopReason.STOP,),
            (3,),
            (typing.cast("Any", 1),),
            (typing.cast("Any", 2),),
            ({"right": 1.0},),
            ref,
        ),
        Partials: make.partials([(1, 0, 0, 4), (1, 1, 3, 7)]),
        Evicted: Evicted(GroupId(1), EvictionReason.AGE, typing.cast("Any", 2)),
    }
    fields = {**_packed(whole[cls]), name: value}
    with pytest.raises(
        ValueError, match="not a valid|columns of|has no row|two rows|without tokens"
    ):
        record_from_fields(cls.type, fields)


def test_every_control_type_has_a_class_and_no_number_is_used_twice() -> None:
    control = {kind for kind in RecordType if kind < 100}
    assert {cls.type for cls in CLASSES} == control
    assert len({cls.type for cls in CLASSES}) == len(CLASSES)


def _format_page_rows() -> dict[int, tuple[str, bool]]:
    page = Path(__file__).parents[2] / "docs" / "formats" / "log.md"
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (D?) ?\|", page.read_text(), re.MULTILINE)
    return {int(number): (name, decision == "D") for number, name, decision in rows}


def test_the_format_page_lists_the_same_types_fields_and_decisions() -> None:
    rows = _format_page_rows()
    assert set(rows) == {int(kind) for kind in RecordType}
    for kind in RecordType:
        name, decision = rows[kind]
        assert name.lower() == kind.name.replace("_", "").lower()
        assert decision == (kind in DECISION_TYPES)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_format_page_names_every_field(cls: type[Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats" / "log.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {int(cls.type)} |"))
    for field in dataclasses.fields(cls):
        assert re.search(rf"\b{field.name}\b", row), f"{cls.__name__}.{field.name}"
