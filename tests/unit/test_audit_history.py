"""Keys, fields and lineage as the audit sees them."""

from __future__ import annotations

import dataclasses
import reprlib
from pathlib import Path
from typing import Any

import audit_writer as w
import numpy as np
import pytest
from audit_cases import add, assert_violation

from perdure.audit import audit_run


def test_key_that_does_not_follow_from_the_fields(tmp_path: Path) -> None:
    record = w.phase_step(1)
    record.key = "phase_step/warm_start/2"
    assert_violation(w.plain(tmp_path, lambda _: [record]), "its header has another key")


@pytest.mark.parametrize(
    "record",
    [
        w.submitted(0, prompt_ids=["a"]),
        w.submitted(0, data_index="0"),
        w.phase_step(1, final=1),
        w.phase_step(1, metrics=[]),
        w.step_done(1, skipped=[1]),
        w.step_done(1, digest=7),
        w.redone(1, incarnation=1, metrics=None),
        w.redone(1, incarnation=1, timings_s=[]),
    ],
)
def test_field_of_another_kind(tmp_path: Path, record: w.Rec) -> None:
    assert_violation(w.plain(tmp_path, lambda _: [record]), "records have the fields")


PAIR = w.packed(w.session_done(0, 0), w.session_done(0, 1))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("sessions", [[0, 0], [0]]),
        ("sessions", [[0, 0], [0, "1"]]),
        ("sessions", 7),
        ("rewards", [1.0, "1"]),
        ("rewards", [1.0, True]),
        ("stop_reasons", ["stop", None]),
        ("tokens", [3, 4.0]),
        ("first_versions", [0, None]),
        ("last_versions", [0, "0"]),
        ("parts", [{}, []]),
        ("parts", [{}, {"correct": "yes"}]),
        ("parts", [{}, {b"correct": 1.0}]),
        ("payload", [1, 0, 64, 64]),
    ],
)
def test_column_of_another_kind(tmp_path: Path, column: str, value: object) -> None:
    record = dataclasses.replace(PAIR, fields=PAIR.fields | {column: value})
    if column == "payload":
        record.arrays = {}
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, f"field {column} of type 4 holds {reprlib.repr(value)}")


@pytest.mark.parametrize(
    "column",
    ["rewards", "stop_reasons", "tokens", "first_versions", "last_versions", "parts"],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_columns_of_unequal_length(tmp_path: Path, column: str, rows: int) -> None:
    values = (2 * PAIR.fields[column])[:rows]
    record = dataclasses.replace(PAIR, fields=PAIR.fields | {column: values})
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, f"{rows} {column} for 2 sessions")


def test_record_without_rows(tmp_path: Path) -> None:
    fields = {name: [] for name in PAIR.fields}
    record = dataclasses.replace(PAIR, fields=fields)
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, "it has no rows")


def test_session_twice_in_a_record(tmp_path: Path) -> None:
    record = w.packed(w.session_done(0, 0), w.session_done(0, 1), w.session_done(0, 0))
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, "g0.s0 has two rows")


def test_key_of_another_session_than_the_first(tmp_path: Path) -> None:
    record = w.packed(w.session_done(0, 0), w.session_done(0, 1))
    record.key = "sessions_done/g0.s1"
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, "its header has another key than sessions_done/g0.s0")


def test_rows_that_counted_are_ignored_and_the_others_count(tmp_path: Path) -> None:
    first = [w.submitted(0), w.submitted(1), w.session_done(0, 0), w.session_done(1, 0)]
    again = w.packed(w.session_done(1, 0), w.session_done(1, 1), w.session_done(0, 0))
    # Its header's key is that of the record before: the rows count for themselves.
    last = w.packed(w.session_done(1, 0), w.session_done(0, 1))
    end = [w.settled(0), w.settled(1)]
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), *first, again, last, *end])
    report = audit_run(run)
    assert not report.findings
    assert report.counts["log.repeated_records"] == 3
    assert report.counts["training.sessions"] == 4
    assert report.counts["training.tokens"] == 3 + 4 + 3 + 4


def test_rows_that_counted_are_ignored_after_their_group_is_settled(tmp_path: Path) -> None:
    again = w.packed(w.session_done(0, 1), w.session_done(1, 0))
    records = [w.published(0, step=0), *w.finished_group(0), w.submitted(1), again]
    assert not audit_run(w.plain(tmp_path, lambda _: records)).findings


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": [0.25]},
        {"parts": [{"correct": 0.0}]},
        {"stop_reasons": ["length"], "payload": {"stop_reasons": ["length"]}},
        {"tokens": [2], "arrays": {"loss_mask": np.array([1, 1, 0], "|u1")}},
        {"version": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_repeated_row_that_says_something_else(tmp_path: Path, changes: dict[str, Any]) -> None:
    records = [
        w.published(0, step=0),
        w.published(1, step=0),
        w.submitted(0),
        w.session_done(0, 0),
        w.packed(w.session_done(0, 1), w.session_done(0, 0, **changes)),
    ]
    run = w.plain(tmp_path, lambda _: records)
    assert_violation(run, "session_done/g0.s0 differs from its first record at")


def test_missing_field(tmp_path: Path) -> None:
    record = w.submitted(0)
    del record.fields["answer"]
    assert_violation(w.plain(tmp_path, lambda _: [record]), "field answer of type 3 holds None")


def test_unknown_and_absent_optional_fields_are_fine(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.write(w.phase_step(1, added_later=[1]))
    fields = {"incarnation": 2, "parent": 1, "base_checkpoint": "", "config_digest": "c"}
    two = run.incarnation(2)
    two.control.segments, two.control.lsn = [], 0
    two.control.open()
    two.control.append(2, key="incarnation/2", fields=fields)
    assert not audit_run(run.save()).findings


@pytest.mark.parametrize("fields", [b"\xc1", b"\x07", b"\x81\x01\x02"])
def test_fields_that_are_no_map_are_damage(
    tmp_path: Path, fields: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    monkeypatch.setattr(w.msgpack, "packb", lambda _: fields)
    one.write(w.phase_step(1))
    report = audit_run(run.save())
    assert [f.what for f in report.findings] == ["its fields are not a map"]
    assert report.findings[0].severity == "damage"


def test_record_that_names_another_incarnation(tmp_path: Path) -> None:
    edit = add(w.redone(2, incarnation=1))
    assert_violation(w.healthy(tmp_path, edit).save(), "it says incarnation 1")


def test_incarnation_that_does_not_start_with_its_parent(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.control.segments, one.control.lsn = [], 0
    one.control.open()
    one.write(w.phase_step(1))
    assert_violation(run.save(), "its first record does not name its parent")


def test_incarnation_that_starts_twice(tmp_path: Path) -> None:
    again = w.Rec(
        "started", {"incarnation": 1, "parent": 0, "base_checkpoint": ""}, "incarnation/1"
    )
    again.fields["config_digest"] = "c"
    assert_violation(w.plain(tmp_path, lambda _: [again]), "its first record does not name")


@pytest.mark.parametrize("parent", [0, 1, 5])
def test_lineage_that_leaves_out_an_incarnation(tmp_path: Path, parent: int) -> None:
    run = w.healthy(tmp_path)
    run.incarnation(3, parent=parent)
    assert_violation(run.save(), f"incarnation 3 goes on from {parent} and leaves out 2")


def test_claimant_that_never_started_is_nobodys_parent(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    third = run.incarnation(3)
    third.control.segments, third.control.lsn = [], 0
    third.control.open()
    run.incarnation(4, parent=2)
    assert not audit_run(run.save()).findings


def test_rewind_makes_later_decisions_void_and_their_groups_available(tmp_path: Path) -> None:
    run = w.healthy(tmp_path, add(*w.finished_group(4, version=2), w.evicted(4)))
    base = run.incarnations[1].end
    third = run.incarnation(3, base_position=base)
    third.write_all([w.taken(2, 0, [2]), w.taken(2, 1, [3, 4]), w.step_done(2, digest="branch")])
    report = audit_run(run.save())
    assert not report.findings
    assert report.counts["log.void_decisions"] == 6
    assert report.counts["groups.trained"] == 5
    fourth = run.incarnation(4, base_position=base)
    fourth.write_all([w.taken(2, 0, [2, 3, 4])])
    report = audit_run(run.save())
    assert not report.findings
    assert report.counts["groups.taken"] == 3


def test_rewind_keeps_what_it_does_not_go_behind(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    third = run.incarnation(3, base_position=run.incarnations[2].end)
    third.write(w.taken(2, 0, [2]))
    report = audit_run(run.save())
    assert not report.findings
    assert (report.counts["log.void_decisions"], report.counts["log.repeated_records"]) == (0, 1)


def test_rewind_to_nowhere(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    incarnation, segment, offset = run.incarnations[1].end
    run.incarnation(3, base_position=[incarnation, segment, offset - 1])
    assert_violation(run.save(), "it goes back to")
