"""What the audit proves about a log whose bytes are right: every promise, each broken once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import audit_writer as w
import numpy as np
import pytest

from perdure.audit import AuditReport, Finding, audit_run
from perdure.core.errors import FutureFormatError

Records = list[w.Rec]
Edit = Callable[[Records], None]


def violations(report: AuditReport) -> list[str]:
    return [finding.line() for finding in report.findings if finding.severity == "violation"]


def assert_violation(run: Path, text: str) -> None:
    report = audit_run(run)
    assert not report.ok
    assert any(text in line for line in violations(report)), report.summary_lines()


def find(records: Records, name: str, **fields: object) -> int:
    """Index of the first record of a kind with these fields."""
    return next(
        index
        for index, record in enumerate(records)
        if record.name == name and fields.items() <= record.fields.items()
    )


def drop(name: str, **fields: object) -> Edit:
    return lambda records: records.__delitem__(find(records, name, **fields))


def change(name: str, *, to: w.Rec) -> Edit:
    return lambda records: records.__setitem__(find(records, name), to)


def set_field(name: str, **fields: object) -> Edit:
    return lambda records: records[find(records, name)].fields.update(fields)


def add(*new: w.Rec, before: str = "") -> Edit:
    def edit(records: Records) -> None:
        index = find(records, before) if before else len(records)
        records[index:index] = new

    return edit


BROKEN: dict[str, tuple[Edit, str]] = {
    # the life of a group
    "session of an unknown group": (drop("submitted", group=2), "group 2 was never submitted"),
    "session after the group's end": (
        lambda r: (drop("settled")(r), add(w.settled(2, "failed"), before="session_done")(r)),
        "group 2 is failed and then session",
    ),
    "finished without sessions": (
        drop("session_done", session=[2, 1]),
        "finished without sessions {1}",
    ),
    "finished without any session": (
        lambda r: [drop("session_done", session=[2, i])(r) for i in (0, 1)],
        "group 2 is pending and then finished",
    ),
    "session index out of range": (
        add(w.session_done(2, 5, version=1), before="settled"),
        "session 5 of group 2",
    ),
    "settled twice": (
        add(w.Rec("settled", w.settled(2, "failed").fields, "group_settled/2"), before="taken"),
        "differs from its first record",
    ),
    "unknown outcome": (
        set_field("settled", outcome="lost"),
        "group 2 is running and then lost",
    ),
    "failed group taken": (set_field("settled", outcome="failed"), "is failed and then taken"),
    "running group taken": (drop("settled", group=2), "is running and then taken"),
    "running group evicted": (
        add(w.submitted(4), w.session_done(4, 0, version=1), w.evicted(4)),
        "group 4 is running and then evicted",
    ),
    "taken group evicted for its age": (
        add(w.evicted(2), before="step_done"),
        "group 2 is taken and then evicted",
    ),
    "trained group evicted": (
        add(w.evicted(2, "poison")),
        "group 2 is trained and then poison",
    ),
    "infinite reward": (set_field("session_done", reward=float("nan")), "rewards are finite"),
    "tool result after the end": (
        add(w.tool_result(2, 0), before="settled"),
        "g2.s0 goes on after its end",
    ),
    "partial after the end": (
        add(w.partial(2, 0, start=0, end=2), before="settled"),
        "g2.s0 goes on after its end",
    ),
    "tool result of an unknown group": (add(w.tool_result(9, 0)), "group 9 was never submitted"),
    # nothing skipped, nothing twice
    "trained twice": (
        lambda r: r[find(r, "taken", update=[2, 1])].fields.update(groups=[2]),
        "group 2 is taken and then taken",
    ),
    "trained again in a later step": (set_field("taken", groups=[1]), "is trained and then taken"),
    "not the oldest": (
        lambda r: [
            x.fields.update(groups=[5 - x.fields["groups"][0]]) for x in r if x.name == "taken"
        ],
        "groups [3] taken, the oldest are [2]",
    ),
    "order inside a batch": (
        lambda r: (
            r[find(r, "taken")].fields.update(groups=[3, 2]),
            r.pop(find(r, "taken", update=[2, 1])),
        ),
        "groups [3, 2] taken, the oldest are [2, 3]",
    ),
    "group number left out": (
        add(*w.finished_group(5, version=1)),
        "group 5 where 4 is missing",
    ),
    "prompt used twice": (set_field("submitted", data_index=1), "data_index 1 appears twice"),
    "prompt skipped": (
        add(w.submitted(4, data_index=7)),
        "data_index 7 where 4 is missing",
    ),
    "counts do not add up": (
        add(w.evicted(2), before="step_done"),
        "submitted = pending + running",
    ),
    "refill of a group that was not evicted": (
        add(w.submitted(4), w.refilled(4, 3)),
        "group 3 is replaced and was not evicted",
    ),
    "refill by a group that is not there": (
        add(w.submitted(4), *w.finished_group(4)[1:], w.evicted(4), w.refilled(5, 4)),
        "group 5 was never submitted",
    ),
    # order of training
    "step skipped": (
        lambda r: [
            x.fields.update(update=[3, x.fields["update"][1]]) for x in r if x.name == "taken"
        ],
        "update 3.0 of 1 groups where 2.0 belongs",
    ),
    "local update skipped": (
        lambda r: r[find(r, "taken", update=[2, 1])].fields.update(update=[2, 2]),
        "update 2.2 of 1 groups where 2.1 belongs",
    ),
    "empty update": (add(w.taken(3, 0, [])), "update 3.0 of 0 groups"),
    "step done without updates": (add(w.step_done(3)), "step 3 is done after step 2 and 0 updates"),
    "step done out of order": (
        set_field("step_done", global_step=3),
        "step 3 is done after step 1",
    ),
    "optimizer step goes down": (set_field("step_done", optimizer_step=1), "went down"),
    "update failed that was not taken": (
        add(w.update_failed(3, 0, incarnation=2)),
        "update 3.0 failed and was not taken",
    ),
    "phase goes back": (add(w.phase_step(6)), "warm_start step 6 follows step 8"),
    # versions and digests
    "version used before it was published": (
        add(w.submitted(4), w.session_done(4, 0, version=9)),
        "version 9 was not published",
    ),
    "published weights are not the step's": (
        set_field("published", digest="other"),
        "whose policy is policy-2",
    ),
    "evaluated weights are not the step's": (
        add(w.evaluated(2, digest="other")),
        "whose policy is policy-2",
    ),
    "published before its step": (add(w.published(3, step=3)), "step 3 is not done"),
    "redo that lies": (
        set_field("redone", digest="other"),
        "step 1 redone with digest other, equal True",
    ),
    "redo of a step that was not done": (
        add(w.redone(3, incarnation=2)),
        "step 3 redone",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_promise(tmp_path: Path, case: str) -> None:
    edit, text = BROKEN[case]
    assert_violation(w.healthy(tmp_path, edit).save(), text)


HARMLESS: dict[str, Edit] = {
    "work in progress": add(
        w.submitted(4),
        w.submitted(5),
        w.session_done(5, 0, version=2),
        *w.finished_group(6, version=2),
    ),
    "partials and tools": add(w.submitted(4), w.partial(4, 0, start=0, end=3), w.tool_result(4, 0)),
    "failed group evicted and replaced": add(
        w.submitted(4),
        w.settled(4, "failed"),
        w.evicted(4, "failed"),
        w.submitted(5),
        w.refilled(5, 4),
    ),
    "finished group evicted": add(*w.finished_group(4, version=2), w.evicted(4)),
    "batch set aside as poison": add(
        *w.finished_group(4, version=2),
        *w.finished_group(5, version=2),
        w.taken(3, 0, [4]),
        w.update_failed(3, 0, incarnation=2),
        w.evicted(4, "poison"),
        w.taken(3, 1, [5]),
        w.step_done(3),
    ),
    "batch taken and not trained yet": add(*w.finished_group(4, version=2), w.taken(3, 0, [4])),
    "record repeated with other times": add(
        w.step_done(2, timings_s={"update": 9.9}), w.session_done(2, 0, version=1)
    ),
    "newer group finished first": add(
        *w.finished_group(4, version=2)[:3],
        *w.finished_group(5, version=2),
        w.taken(3, 0, [5]),
        w.settled(4),
        w.taken(3, 1, [4]),
    ),
    "empty answer": add(
        w.submitted(4),
        w.session_done(
            4,
            0,
            version=1,
            tokens=0,
            arrays={
                "response_ids": np.zeros(0, "<i4"),
                "logprobs": np.zeros(0, "<f4"),
                "loss_mask": np.zeros(0, "|u1"),
            },
            payload={"segments": []},
        ),
    ),
    "orderly end": add(w.closed(2)),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless(tmp_path: Path, case: str) -> None:
    report = audit_run(w.healthy(tmp_path, HARMLESS[case]).save())
    assert not report.findings


def test_repeats_are_counted(tmp_path: Path) -> None:
    run = w.healthy(tmp_path, HARMLESS["record repeated with other times"])
    assert audit_run(run.save()).counts["log.repeated_records"] == 2


def test_refilled_by_one_group_twice(tmp_path: Path) -> None:
    evictions = [r for g in (4, 5) for r in (w.submitted(g), w.settled(g, "failed"), w.evicted(g))]
    edit = add(*evictions, w.submitted(6), w.refilled(6, 4), w.refilled(6, 5))
    assert_violation(w.healthy(tmp_path, edit).save(), "group 6 replaces a second group")


def test_version_never_means_other_bytes_even_after_a_rewind(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    base = run.incarnations[1].end
    third = run.incarnation(3, base_position=base)
    third.write(w.published(2, step=1, digest="policy-1"))
    assert_violation(run.save(), "version 2 was published with other bytes")


def test_unequal_redo_is_noted_and_explains_other_weights(tmp_path: Path) -> None:
    def edit(records: Records) -> None:
        records[0] = w.redone(1, incarnation=2, digest="drifted", equal=False)
        records.insert(1, w.published(7, step=1, digest="drifted-policy"))

    report = audit_run(w.healthy(tmp_path, edit).save())
    assert report.ok
    assert [finding.severity for finding in report.findings] == ["note"]
    assert "came out differently" in report.findings[0].what


# --- trajectories -------------------------------------------------------------------------------


def i4(*values: int) -> np.ndarray:
    return np.array(values, "<i4")


def f4(*values: float) -> np.ndarray:
    return np.array(values, "<f4")


INSANE: dict[str, tuple[w.Rec, str]] = {
    "other prompt": (w.session_done(0, 0, arrays={"prompt_ids": i4(1, 2, 3)}), "its prompt is not"),
    "fewer log-probabilities": (
        w.session_done(0, 0, arrays={"logprobs": f4(-1, -1)}),
        "2 log-prob",
    ),
    "more tokens": (
        w.session_done(0, 0, arrays={"response_ids": i4(1, 2, 3, 4)}),
        "4 tokens and 3",
    ),
    "nan": (w.session_done(0, 0, arrays={"logprobs": f4(-1, np.nan, -1)}), "not a finite number"),
    "minus infinity": (
        w.session_done(0, 0, arrays={"logprobs": f4(-1, -np.inf, -1)}),
        "not a finite number",
    ),
    "positive": (w.session_done(0, 0, arrays={"logprobs": f4(-1, 0.5, -1)}), "not a finite number"),
    "negative token": (w.session_done(0, 0, arrays={"response_ids": i4(1, -2, 3)}), "is negative"),
    "mask of twos": (
        w.session_done(0, 0, tokens=2, arrays={"loss_mask": np.array([1, 1, 2], "|u1")}),
        "the loss mask has 2 ones",
    ),
    "token count": (w.session_done(0, 0, tokens=2), "2 tokens, but the loss mask has 3 ones"),
    "gap between segments": (
        w.session_done(0, 0, payload={"segments": [[0, 0, 1], [0, 2, 3]]}),
        "a segment from 2 to 3 follows token 1",
    ),
    "empty segment": (
        w.session_done(0, 0, payload={"segments": [[0, 0, 0], [0, 0, 3]]}),
        "a segment from 0 to 0",
    ),
    "uncovered end": (
        w.session_done(0, 0, payload={"segments": [[0, 0, 2]]}),
        "its segments end at 2 of 3",
    ),
    "other versions": (
        w.session_done(0, 0, payload={"segments": [[1, 0, 3]]}),
        "its versions are [1]",
    ),
    "other session": (
        w.session_done(0, 0, payload={"session": [0, 1]}),
        "session [0, 1] with stop",
    ),
    "other stop reason": (w.session_done(0, 0, payload={"stop_reason": "length"}), "with length"),
    "other type": (w.session_done(0, 0, arrays={"logprobs": np.zeros(3)}), "array logprobs is <f8"),
    "two dimensions": (
        w.session_done(0, 0, arrays={"response_ids": np.ones((1, 3), "<i4")}),
        "of shape [1, 3]",
    ),
    "an array too many": (w.session_done(0, 0, arrays={"extra": i4(1)}), "array extra is <i4"),
    "an array too few": (
        w.session_done(0, 0, payload={"arrays_as": [["prompt_ids", "<i4", [3], 256, 12]]}),
        "its arrays are ['prompt_ids']",
    ),
    "unaligned array": (
        w.session_done(0, 0, payload={"arrays_as": [["prompt_ids", "<i4", [3], 260, 12]]}),
        "lies at byte 260",
    ),
    "array in the header": (
        w.session_done(0, 0, payload={"arrays_as": [["prompt_ids", "<i4", [3], 0, 12]]}),
        "lies at byte 0",
    ),
    "array beyond the record": (
        w.session_done(0, 0, payload={"arrays_as": [["prompt_ids", "<i4", [3], 6400, 12]]}),
        "lies at byte 6400",
    ),
    "no arrays named": (w.session_done(0, 0, payload={"arrays_as": 7}), "trajectory/g0.s0: "),
    "partial of another length": (
        w.partial(0, 0, start=0, end=5, count=2),
        "2 tokens and 2 log-probabilities, expected 5",
    ),
}


@pytest.mark.parametrize("case", INSANE)
def test_insane_payload(tmp_path: Path, case: str) -> None:
    record, text = INSANE[case]
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, text)


def test_payload_of_another_session(tmp_path: Path) -> None:
    record = w.session_done(0, 0)
    record.payload_key = "trajectory/g0.s1"
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, "its payload is not trajectory/g0.s0")


def test_payload_of_another_type(tmp_path: Path) -> None:
    record = w.session_done(0, 0)
    record.payload_type = 103
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, "its payload is not trajectory/g0.s0")


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, 7, "no record"),
        (2, 64, "no record"),
        (3, 64, "another record"),
        (4, 1, "another record"),
    ],
)
@pytest.mark.parametrize("make", [w.session_done, w.partial])
def test_dangling_payload_reference_is_damage(
    tmp_path: Path, make: Callable[..., w.Rec], index: int, value: int, text: str
) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    one.write_all([w.published(0, step=0), w.submitted(0)])
    record = make(0, 0) if make is w.session_done else make(0, 0, start=0, end=2)
    reference = one.payload.append(
        record.payload_type, key=record.payload_key, fields=record.payload, arrays=record.arrays
    )
    reference[index] = value
    record.fields["payload"], record.arrays = reference, {}
    one.write(record)
    report = audit_run(run.save())
    assert [f.severity for f in report.findings if text in f.what] == ["damage"]


# --- keys, fields, lineage ----------------------------------------------------------------------


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


# --- checkpoints and metrics --------------------------------------------------------------------


@pytest.mark.parametrize("change", ["flip", "grow", "unlink"])
@pytest.mark.parametrize("name", ["model/policy.safetensors", "state.msgpack", "manifest.json"])
def test_wrong_checkpoint_file_is_damage(tmp_path: Path, name: str, change: str) -> None:
    run = w.healthy(tmp_path).save()
    path = run / "checkpoints/step-00000001-1" / name
    if change == "unlink":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data + b" " if change == "grow" else bytes([data[0] ^ 1]) + data[1:])
    report = audit_run(run)
    assert [(f.severity, f.where) for f in report.findings] == [
        ("damage", f"checkpoints/step-00000001-1/{name}")
    ]


def test_empty_checkpoint_file(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    entry = {"bytes": 0, "xxh3_128": w.xxhash.xxh3_128_hexdigest(b"")}
    commit = run.checkpoint("step-00000000-1", manifest={"files": {"empty": entry}})
    run.incarnation(1).write(commit)
    run.files["checkpoints/step-00000000-1/empty"] = b""
    assert not audit_run(run.save()).findings


def test_manifest_that_is_no_sealed_json_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    with monkeypatch.context() as patched:
        patched.setattr(w, "sealed", lambda _: b"{}")
        one.write(run.checkpoint("step-00000000-1"))
    assert [finding.what for finding in audit_run(run.save()).findings] == [
        "the digest does not match"
    ]


@pytest.mark.parametrize("manifest", [{"format": 2}, {"features": ["sharded"]}])
def test_manifest_of_a_newer_version_stops_the_audit(
    tmp_path: Path, manifest: dict[str, object]
) -> None:
    run = w.plain(tmp_path, lambda r: [r.checkpoint("step-00000000-1", manifest=manifest)])
    with pytest.raises(FutureFormatError):
        audit_run(run)


@pytest.mark.parametrize(
    "manifest",
    [
        {"name": {"phase": "warm", "step": 0, "incarnation": 1}},
        {"name": {"phase": "train", "step": 1, "incarnation": 1}},
        {"position": [1, 0, 64]},
    ],
)
def test_manifest_and_commit_must_agree(tmp_path: Path, manifest: dict[str, object]) -> None:
    run = w.plain(tmp_path, lambda r: [r.checkpoint("step-00000000-1", manifest=manifest)])
    assert_violation(run, "a commit and its manifest")


def test_quarantined_checkpoint_is_noted(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    directory = "checkpoints/step-00000001-1/"
    run.files = {k: v for k, v in run.files.items() if not k.startswith(directory)}
    run.files["quarantine/step-00000001-1.reason.json"] = b"{}"
    report = audit_run(run.save())
    assert report.ok
    assert [finding.severity for finding in report.findings] == ["note"]


def test_collected_checkpoint_needs_no_files(tmp_path: Path) -> None:
    run = w.healthy(tmp_path, add(w.collect("step-00000001-1", "never-committed")))
    run.files = {k: v for k, v in run.files.items() if "step-00000001-1" not in k}
    assert not audit_run(run.save()).findings


def test_collecting_the_last_checkpoint(tmp_path: Path) -> None:
    directories = ("warm-00000008-1", "step-00000000-1", "step-00000001-1")
    run = w.healthy(tmp_path, add(w.collect(*directories)))
    assert_violation(run.save(), "the last committed checkpoint is never collected")


def test_void_checkpoint_needs_no_files(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    two = run.incarnations[2]
    two.write(run.checkpoint("step-00000002-2"))
    run.files = {k: v for k, v in run.files.items() if "step-00000002-2" not in k}
    run.incarnation(3, base_position=run.incarnations[1].end)
    assert not audit_run(run.save()).findings


@pytest.mark.parametrize(
    ("directory", "shift", "text"),
    [
        ("step-00000002-2", -1, "is not the end of an earlier kept record"),
        ("step-00000002-2", 10_000_000, "is not the end of an earlier kept record"),
        ("step-00000003-2", 0, "step 3 is not done"),
        ("step-00000001-2", 0, "step 2 has begun"),
        ("warm-00000009-2", -1, "is not the end of an earlier kept record"),
    ],
)
def test_position_of_a_checkpoint(tmp_path: Path, directory: str, shift: int, text: str) -> None:
    run = w.healthy(tmp_path)
    two = run.incarnations[2]
    incarnation, segment, offset = two.end
    two.write(run.checkpoint(directory, position=[incarnation, segment, offset + shift]))
    assert_violation(run.save(), text)


def test_position_of_a_checkpoint_before_its_step_was_done(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    records = w.first_step(run)
    middle = find(records, "step_done")
    one.write_all(records[:middle])
    position = one.end
    one.write(records[middle])
    one.write(run.checkpoint("step-00000001-1", position=position))
    assert_violation(run.save(), "step 1 is not done at its position")


def test_position_after_the_commit_itself(tmp_path: Path) -> None:
    run = w.Run(tmp_path)
    one = run.incarnation(1)
    incarnation, segment, offset = one.end
    one.write(run.checkpoint("warm-00000001-1", position=[incarnation, segment, offset + 1344]))
    while one.end[2] < offset + 1344:
        one.write(w.closed(1))
    assert one.end[2] == offset + 1344
    assert_violation(run.save(), "is not the end of an earlier kept record")


def test_metrics_beyond_the_log_are_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.metrics([(1, "state-1"), (2, "state-2"), (3, "state-3")])
    report = audit_run(run.save())
    assert [(f.severity, f.where) for f in report.findings] == [
        ("damage", "metrics/steps.jsonl line 3")
    ]
    assert "the log is shorter than its metrics" in report.findings[0].what


def test_metrics_of_other_weights_are_damage(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.metrics([(1, "other")], "evaluations.jsonl")
    assert [f.severity for f in audit_run(run.save()).findings] == ["damage"]


def test_metrics_of_void_and_redone_steps_are_known(tmp_path: Path) -> None:
    run = w.healthy(
        tmp_path, change("redone", to=w.redone(1, incarnation=2, digest="d", equal=False))
    )
    run.incarnation(3, base_position=run.incarnations[1].end)
    run.metrics([(1, "state-1"), (1, "d"), (2, "state-2")])
    assert audit_run(run.save()).ok


def test_torn_and_unreadable_rows(tmp_path: Path) -> None:
    run = w.healthy(tmp_path)
    run.files["metrics/steps.jsonl"] += b'{"global_step": 3, "dig'
    assert not audit_run(run.save()).findings
    run.files["metrics/steps.jsonl"] += b'\n[]\n{"global_step": "x", "digest": "y"}\n'
    findings: Sequence[Finding] = audit_run(run.save()).findings
    assert [finding.severity for finding in findings] == ["note"] * 3
