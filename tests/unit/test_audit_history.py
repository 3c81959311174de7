"""Keys, fields and lineage as the audit sees them."""

from __future__ import annotations

from pathlib import Path

import audit_writer as w
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
        w.session_done(0, 0, session=[0]),
        w.session_done(0, 0, reward="1"),
    ],
)
def test_field_of_another_kind(tmp_path: Path, record: w.Rec) -> None:
    assert_violation(w.plain(tmp_path, lambda _: [record]), "records have the fields")


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
