"""What the audit proves about a log whose bytes are right: every promise, each broken once."""

from __future__ import annotations

from pathlib import Path

import audit_unfinished as u
import audit_writer as w
import numpy as np
import pytest
from audit_cases import Edit, Records, add, assert_violation, drop, find, set_field

from perdure.audit import audit_run

BROKEN: dict[str, tuple[Edit, str]] = {
    # the life of a group
    "session of an unknown group": (drop("submitted", group=2), "group 2 was never submitted"),
    "session after the group's end": (
        lambda r: (drop("settled")(r), add(w.settled(2, "failed"), before="sessions_done")(r)),
        "group 2 is failed and then session",
    ),
    "finished without sessions": (
        drop("sessions_done", sessions=[[2, 1]]),
        "finished without sessions {1}",
    ),
    "finished without any session": (
        lambda r: [drop("sessions_done", sessions=[[2, i]])(r) for i in (0, 1)],
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
    "infinite reward": (
        set_field("sessions_done", rewards=[float("nan")]),
        "the reward of g2.s0 is nan; rewards are finite",
    ),
    "infinite reward beside a finite one": (
        add(
            w.submitted(4),
            w.packed(
                w.session_done(4, 0, version=1),
                w.session_done(4, 1, version=1, rewards=[float("-inf")]),
            ),
        ),
        "the reward of g4.s1 is -inf; rewards are finite",
    ),
    "unknown group in the middle of a record": (
        add(
            w.submitted(4),
            w.packed(
                w.session_done(4, 0, version=1),
                w.session_done(5, 0, version=1),
                w.session_done(4, 1, version=1),
            ),
        ),
        "group 5 was never submitted",
    ),
    "closed group in the middle of a record": (
        add(
            w.submitted(4),
            w.packed(w.session_done(4, 0, version=1), w.session_done(3, 2, version=1)),
        ),
        "group 3 is trained and then session",
    ),
    "index out of range in the middle of a record": (
        add(
            w.submitted(4),
            w.packed(
                w.session_done(4, 0, version=1),
                w.session_done(4, -1, version=1),
                w.session_done(4, 1, version=1),
            ),
        ),
        "session -1 of group 4",
    ),
    "tool result after the end": (
        add(u.tool_result(2, 0), before="settled"),
        "g2.s0 goes on after its end",
    ),
    "partial after the end": (
        add(u.partial(2, 0, start=0, end=2), before="settled"),
        "g2.s0 goes on after its end",
    ),
    "tool result of an unknown group": (add(u.tool_result(9, 0)), "group 9 was never submitted"),
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
    "last version of a row that was not published": (
        add(
            w.submitted(4),
            w.packed(
                w.session_done(4, 0, version=1),
                w.session_done(
                    4,
                    1,
                    version=1,
                    last_versions=[9],
                    payload={"segments": [[[1, 0, 2], [9, 2, 4]]]},
                ),
            ),
        ),
        "g4.s1: version 9 was not published",
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
    "partials and tools": add(w.submitted(4), u.partial(4, 0, start=0, end=3), u.tool_result(4, 0)),
    "a restart before anything else": add(w.submitted(4), u.session_restarted(4, 0)),
    "failed group evicted and replaced": add(
        w.submitted(4),
        w.settled(4, "failed"),
        w.evicted(4, "failed"),
        w.submitted(5),
        w.refilled(5, 4),
    ),
    "finished group evicted": add(*w.finished_group(4, version=2), w.evicted(4)),
    "evicted group passed over": add(
        *w.finished_group(4, version=2),
        *w.finished_group(5, version=2),
        w.evicted(4),
        w.taken(3, 0, [5]),
    ),
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
        w.step_done(2, timings_s={"update": 9.9}, metrics={"loss": float("nan"), "reward": 0.5}),
        w.session_done(2, 0, version=1),
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
            tokens=[0],
            arrays={
                "response_ids": np.zeros(0, "<i4"),
                "logprobs": np.zeros(0, "<f4"),
                "loss_mask": np.zeros(0, "|u1"),
            },
            payload={"response_tokens": [0], "segments": [[]]},
        ),
    ),
    "orderly end": add(w.closed(2)),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless(tmp_path: Path, case: str) -> None:
    report = audit_run(w.healthy(tmp_path, HARMLESS[case]).save())
    assert not report.findings


def test_group_that_was_passed_over_stays_the_oldest(tmp_path: Path) -> None:
    edit, text = BROKEN["not the oldest"]
    findings = audit_run(w.healthy(tmp_path, edit).save()).findings
    assert [finding.what for finding in findings] == [text]


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
