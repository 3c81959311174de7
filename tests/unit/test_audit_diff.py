"""Comparison of two runs: by what was trained, in training order, whatever the files look like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import audit_writer as w
import numpy as np
import pytest

from perdure.audit import DiffReport, diff_runs
from perdure.core.errors import AuditFailedError, DamagedError, NothingToResumeError

Records = list[w.Rec]


def run_of(path: Path, edit: Callable[[Records], object] | None = None) -> Path:
    """One uninterrupted incarnation of two steps."""
    run = w.Run(path)
    records = [*w.first_step(run), *w.second_step(incarnation=1)[1:]]
    if edit is not None:
        edit(records)
    run.incarnation(1).write_all(records)
    return run.save()


def replace(record: w.Rec) -> Callable[[Records], object]:
    """Put a record in the place of that with its key."""

    def edit(records: Records) -> None:
        index = [r.key for r in records].index(record.key)
        records[index] = record

    return edit


def compare(tmp_path: Path, edit: Callable[[Records], object]) -> DiffReport:
    return diff_runs(run_of(tmp_path / "a"), run_of(tmp_path / "b", edit))


def assert_differ(report: DiffReport, where: str, aspect: str) -> None:
    assert not report.ok
    assert report.divergence is not None
    assert (report.divergence.where, report.divergence.aspect) == (where, aspect)
    assert report.divergence.first != report.divergence.second


def test_equal_runs(tmp_path: Path) -> None:
    report = compare(tmp_path, lambda records: None)
    assert report.ok
    assert dict(report.counts) == {"updates": 4, "steps": 2, "evaluations": 2, "phase steps": 2}


def test_killed_and_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    resumed = w.healthy(tmp_path / "b")
    one = resumed.incarnations[1]
    one.payload.append(103, key="transitions/a/0", fields={})  # beyond the seal
    third = resumed.incarnation(3, base_checkpoint="step-00000001-1")
    third.write_all([w.redone(2, incarnation=3), w.published(2, step=2)])
    assert diff_runs(run_of(tmp_path / "a"), resumed.save()).ok


def test_rewound_run_is_compared_by_its_kept_branch(tmp_path: Path) -> None:
    rewound = w.healthy(tmp_path / "b")
    third = rewound.incarnation(3, base_position=rewound.incarnations[1].end)
    third.write_all([w.taken(2, 0, [2]), w.taken(2, 1, [3]), w.step_done(2, digest="branch")])
    report = diff_runs(run_of(tmp_path / "a"), rewound.save())
    assert_differ(report, "global step 2, its end", "digest")


def test_wall_clock_times_and_versions_are_left_out(tmp_path: Path) -> None:
    def edit(records: Records) -> None:
        replace(w.step_done(1, timings_s={"update": 99.0}))(records)
        replace(w.phase_step(4, timings_s={"warm_start": 99.0}))(records)
        records.insert(0, w.published(7, step=0))
        replace(w.session_done(2, 0, version=7))(records)

    assert compare(tmp_path, edit).ok


def test_order_of_maps_is_left_out(tmp_path: Path) -> None:
    parts = {"correct": 1.0, "format": 0.5}
    first = run_of(tmp_path / "a", replace(w.session_done(0, 0, parts=[parts])))
    turned = dict(reversed(parts.items()))
    assert diff_runs(
        first, run_of(tmp_path / "b", replace(w.session_done(0, 0, parts=[turned])))
    ).ok


def test_file_positions_and_group_numbers_are_left_out(tmp_path: Path) -> None:
    def edit(records: Records) -> None:
        records[0:0] = [
            w.submitted(2, prompt_ids=[1, 2, 3]),
            w.submitted(3, prompt_ids=[1, 2, 2]),
        ]
        # Groups 2 and 3 change their numbers and nothing else.
        for record in [r for r in records if r.key in ("submitted/2", "submitted/3")][2:]:
            records.remove(record)
        for group, old in ((2, 3), (3, 2)):
            records[[r.key for r in records].index(f"submitted/{group}")].fields["answer"] = str(
                old
            )
            for index in (0, 1):
                session = w.session_done(old, index, version=1)
                mine = w.session_done(group, index, version=1, arrays=session.arrays)
                replace(mine)(records)
        first, second = (r for r in records if r.name == "taken" and r.fields["update"][0] == 2)
        first.fields["groups"], second.fields["groups"] = [3], [2]

    assert compare(tmp_path, edit).ok


def test_what_shares_a_record_is_left_out(tmp_path: Path) -> None:
    alone = run_of(tmp_path / "a")
    together = run_of(
        tmp_path / "b", lambda records: records.__setitem__(slice(None), w.pack(records))
    )
    report = diff_runs(alone, together)
    assert report.ok
    assert report.counts["updates"] == 4


@pytest.mark.parametrize(("group", "index"), [(0, 1), (1, 0), (3, 1)])
def test_first_diverging_session_is_named_wherever_it_lies(
    tmp_path: Path, group: int, index: int
) -> None:
    """Later sessions differ as well, of which some lie in the same record."""

    def edit(records: Records) -> None:
        for g, i in [(g, i) for g in range(4) for i in (0, 1) if (g, i) >= (group, index)]:
            version = int(g > 1)
            values = np.full(3 + i, -0.5, "<f4")
            replace(w.session_done(g, i, version=version, arrays={"logprobs": values}))(records)
        records[:] = w.pack(records)

    report = compare(tmp_path, edit)
    where = f"global step {1 + group // 2}, local update {group % 2}"
    assert_differ(report, where, f"group 1 of 1, session {index}, log-probabilities")


LOGPROBS = {"logprobs": np.full(3, -0.5, "<f4")}

DIFFERENT = {
    "warm start": (w.phase_step(8, digest="x"), "warm_start step 8", "digest"),
    "prompt": (
        w.submitted(1, answer="x"),
        "global step 1, local update 1",
        "group 1 of 1, prompt",
    ),
    "tokens": (
        w.session_done(1, 0, arrays={"response_ids": np.array([1, 2, 3], "<i4")}),
        "global step 1, local update 1",
        "group 1 of 1, session 0, tokens",
    ),
    "mask": (
        w.session_done(1, 0, tokens=[2], arrays={"loss_mask": np.array([1, 0, 1], "|u1")}),
        "global step 1, local update 1",
        "group 1 of 1, session 0, tokens",
    ),
    "log-probabilities": (
        w.session_done(1, 0, arrays=LOGPROBS),
        "global step 1, local update 1",
        "group 1 of 1, session 0, log-probabilities",
    ),
    "reward": (
        w.session_done(0, 1, rewards=[0.25]),
        "global step 1, local update 0",
        "group 1 of 1, session 1, reward",
    ),
    "parts of a reward": (
        w.session_done(0, 1, parts=[{"correct": 0.0}]),
        "global step 1, local update 0",
        "group 1 of 1, session 1, reward",
    ),
    "state": (w.step_done(2, digest="x"), "global step 2, its end", "digest"),
    "policy": (
        w.step_done(2, policy_digest="policy-2", digest="state-2", skipped=["1/0/0 nan"]),
        "global step 2, its end",
        "skipped",
    ),
    "optimizer step": (
        w.step_done(2, optimizer_step=9),
        "global step 2, its end",
        "optimizer_step",
    ),
    "metric": (
        w.step_done(1, metrics={"reward": 0.25, "loss": float("nan")}),
        "global step 1, its end",
        "metric reward",
    ),
    "metric that only one has": (
        w.step_done(1, metrics={"reward": 0.5}),
        "global step 1, its end",
        "metric loss",
    ),
    "evaluation": (
        w.evaluated(1, accuracy=0.25),
        "evaluation after global step 1",
        "metric accuracy",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_first_divergence(tmp_path: Path, case: str) -> None:
    record, where, aspect = DIFFERENT[case]
    assert_differ(compare(tmp_path, replace(record)), where, aspect)


def test_batch_of_another_size(tmp_path: Path) -> None:
    def edit(records: Records) -> None:
        del records[[r.key for r in records].index("taken/u2.1")]
        records[[r.key for r in records].index("taken/u2.0")].fields["groups"] = [2, 3]

    report = compare(tmp_path, edit)
    assert_differ(report, "global step 2, local update 0", "groups in the batch")


def test_shorter_run(tmp_path: Path) -> None:
    report = compare(tmp_path, lambda records: records.__delitem__(slice(-2, None)))
    assert_differ(report, "global step 2, its end", "only one run has it")
    assert dict(report.counts) == {"updates": 4, "steps": 1, "evaluations": 2, "phase steps": 2}


def test_second_evaluation_of_a_step(tmp_path: Path) -> None:
    report = compare(tmp_path, lambda records: records.append(w.evaluated(2)))
    assert_differ(report, "evaluation after global step 2", "only one run has it")


def test_comparison_refuses_damage(tmp_path: Path) -> None:
    damaged = w.healthy(tmp_path / "b").save()
    (damaged / "seals/1.json").unlink()
    with pytest.raises(DamagedError, match=r"seals/1\.json"):
        diff_runs(run_of(tmp_path / "a"), damaged)


@pytest.mark.parametrize("edit", [lambda r: r.remove(next(x for x in r if x.key == "submitted/1"))])
def test_comparison_refuses_what_cannot_be(
    tmp_path: Path, edit: Callable[[Records], object]
) -> None:
    with pytest.raises(AuditFailedError, match="group 1 was taken and never submitted"):
        compare(tmp_path, edit)


def test_comparison_refuses_insane_trajectories(tmp_path: Path) -> None:
    with pytest.raises(AuditFailedError, match="trajectories/g1.s0: g1.s0: 1 tokens"):
        compare(tmp_path, replace(w.session_done(1, 0, tokens=[1])))


def test_comparison_refuses_a_broken_lineage(tmp_path: Path) -> None:
    broken = w.healthy(tmp_path / "b")
    broken.incarnation(3, parent=1)
    with pytest.raises(AuditFailedError, match="leaves out 2"):
        diff_runs(run_of(tmp_path / "a"), broken.save())


def test_comparison_with_no_run(tmp_path: Path) -> None:
    with pytest.raises(NothingToResumeError):
        diff_runs(run_of(tmp_path / "a"), tmp_path / "b")
