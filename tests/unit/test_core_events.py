"""Event lines: declared fields first and in order, the others behind."""

from __future__ import annotations

import pytest

from perdure.core.events import FIELDS, format_event, ignore_events


def test_declared_fields_come_first_in_their_order() -> None:
    fields: dict[str, object] = {"extra": True, "seconds": 1.23456, "reward": 0.5, "global_step": 3}
    assert format_event("step", fields) == "step global_step=3 reward=0.5 seconds=1.235 extra=True"


def test_a_missing_field_is_an_error() -> None:
    with pytest.raises(KeyError, match="reward"):
        format_event("step", {"global_step": 3, "seconds": 1.0})


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing_known"):
        format_event("nothing_known", {})


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_event_has_distinct_fields_and_one_line(name: str) -> None:
    fields = FIELDS[name]
    assert len(set(fields)) == len(fields)
    line = format_event(name, dict.fromkeys(fields, 1))
    assert line == " ".join([name, *(f"{field}=1" for field in fields)])


def test_events_may_be_ignored() -> None:
    ignore_events("anything", {"any": 1})
