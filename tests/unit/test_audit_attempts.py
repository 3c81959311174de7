"""What the audit demands of sessions that are not done: no gap, no second call, no other start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import audit_unfinished as u
import audit_writer as w
import numpy as np
import pytest
from audit_cases import assert_clean, assert_violation

from perdure.audit import audit_run

MASKED = {"loss_mask": np.array([1, 0, 1], "|u1")}


def run_of(path: Path, *records: w.Rec) -> Path:
    """Two open groups, and these records."""
    before = [w.published(0, step=0), w.published(1, step=0), w.submitted(0), w.submitted(1)]
    return w.plain(path, lambda _: [*before, *records])


def masked_partial(*, start: int, mask: Sequence[int]) -> w.Rec:
    array = np.array(mask, "|u1")
    end = start + len(mask)
    return u.partial(0, 0, start=start, end=end, arrays={"loss_mask": array})


SANE: dict[str, list[w.Rec]] = {
    "pieces, then the whole": [
        u.partial(0, 0, start=0, end=1),
        u.partial(0, 0, start=1, end=3),
        w.session_done(0, 0),
    ],
    "rows of several sessions": [
        w.packed(u.partial(0, 0, start=0, end=2), u.partial(1, 1, start=0, end=4)),
        w.packed(u.partial(1, 0, start=0, end=1), u.partial(0, 0, start=2, end=3)),
        w.packed(w.session_done(0, 0), w.session_done(1, 1)),
    ],
    "a piece of each version": [
        u.partial(0, 0, start=0, end=1),
        u.partial(0, 0, start=1, end=2, version=1),
        w.session_done(
            0, 0, last_versions=[1], payload={"segments": [[[0, 0, 1], [1, 1, 2], [1, 2, 3]]]}
        ),
    ],
    "a restart": [
        u.partial(0, 0, start=0, end=2, arrays={"token_ids": np.array([7, 7], "<i4")}),
        u.tool_result(0, 0),
        u.session_restarted(0, 0),
        u.tool_result(0, 0, attempt=1, result="y"),
        u.partial(0, 0, start=0, end=2, attempt=1),
        w.session_done(0, 0),
    ],
    "another way after a restart": [
        u.partial(0, 0, start=0, end=2, arrays={"token_ids": np.array([7, 7], "<i4")}),
        u.session_restarted(0, 0),
        w.session_done(0, 0),
    ],
    "a piece of a group that fails": [
        u.partial(0, 0, start=0, end=2),
        w.settled(0, "failed"),
        w.evicted(0, "failed"),
    ],
    "results before what they led to": [
        u.tool_result(0, 0, turn=0, call=0),
        u.tool_result(0, 0, turn=0, call=1),
        masked_partial(start=0, mask=[1, 0]),
        w.session_done(0, 0, tokens=[2], arrays=MASKED),
    ],
    "one outcome over two pieces": [
        u.tool_result(0, 0, turn=3),
        masked_partial(start=0, mask=[1, 0]),
        masked_partial(start=2, mask=[0, 1]),
    ],
}


@pytest.mark.parametrize("case", SANE)
def test_sane(tmp_path: Path, case: str) -> None:
    assert_clean(run_of(tmp_path, *SANE[case]))


def changed_start(**arrays: np.ndarray) -> list[w.Rec]:
    return [u.partial(0, 0, start=0, end=2, arrays=arrays), w.session_done(0, 0)]


BROKEN: dict[str, tuple[list[w.Rec], str]] = {
    "a gap": (
        [u.partial(0, 0, start=0, end=1), u.partial(0, 0, start=2, end=3)],
        "g0.s0: token 2 of attempt 0 follows token 1 of attempt 0",
    ),
    "no beginning": ([u.partial(0, 0, start=1, end=3)], "token 1 of attempt 0 follows token 0"),
    "an overlap": (
        [u.partial(0, 0, start=0, end=2), u.partial(0, 0, start=1, end=3)],
        "token 1 of attempt 0 follows token 2",
    ),
    "an attempt that never began": (
        [u.partial(0, 0, start=0, end=2, attempt=1)],
        "token 0 of attempt 1 follows token 0 of attempt 0",
    ),
    "an attempt that was given up": (
        [u.session_restarted(0, 0), u.partial(0, 0, start=0, end=2)],
        "token 0 of attempt 0 follows token 0 of attempt 1",
    ),
    "a result of an attempt that was given up": (
        [u.session_restarted(0, 0), u.tool_result(0, 0)],
        "a tool result of attempt 0 in attempt 1",
    ),
    "an attempt left out": ([u.session_restarted(0, 0, attempt=2)], "attempt 2 follows attempt 0"),
    "a restart after the end": (
        [w.session_done(0, 0), u.session_restarted(0, 0)],
        "g0.s0 goes on after its end",
    ),
    "a piece of no session": ([u.partial(0, 2, start=0, end=1)], "session 2 of group 0"),
    "a piece of a failed group": (
        [w.settled(0, "failed"), u.partial(0, 0, start=0, end=1)],
        "group 0 is failed and then session",
    ),
    "a version that nobody published": (
        [u.partial(0, 0, start=0, end=1, version=2)],
        "g0.s0: version 2 was not published",
    ),
    "a call that was made twice": (
        [u.tool_result(0, 0), u.tool_result(0, 0)],
        "tool_result/g0.s0/0/0/0 was journaled before",
    ),
    "a call with two results": (
        [u.tool_result(0, 0), u.tool_result(0, 0, result="y")],
        "tool_result/g0.s0/0/0/0 differs from its first record",
    ),
    "a result that was never journaled": (
        [w.session_done(0, 0, tokens=[2], arrays=MASKED)],
        "g0.s0: 1 pieces that the policy did not generate, 0 turns with a result",
    ),
    "a result journaled for another session": (
        [u.tool_result(0, 1), w.session_done(0, 0, tokens=[2], arrays=MASKED)],
        "g0.s0: 1 pieces that the policy did not generate, 0 turns",
    ),
    "a result used before it was journaled": (
        [masked_partial(start=0, mask=[1, 0]), u.tool_result(0, 0)],
        "g0.s0: 1 pieces that the policy did not generate, 0 turns",
    ),
    "a result of the attempt before": (
        [
            u.tool_result(0, 0),
            u.session_restarted(0, 0),
            w.session_done(0, 0, tokens=[2], arrays=MASKED),
        ],
        "g0.s0: 1 pieces that the policy did not generate, 0 turns",
    ),
    "more outcomes than turns": (
        [
            u.tool_result(0, 0, call=0),
            u.tool_result(0, 0, call=1),
            masked_partial(start=0, mask=[0, 1]),
            masked_partial(start=2, mask=[0]),
        ],
        "g0.s0: 2 pieces that the policy did not generate, 1 turns",
    ),
    "other tokens at the start": (
        changed_start(token_ids=np.array([0, 9], "<i4")),
        "g0.s0: its array response_ids does not begin with the 2 logged tokens",
    ),
    "other log-probabilities at the start": (
        changed_start(logprobs=np.array([-0.25, -0.5], "<f4")),
        "g0.s0: its array logprobs does not begin with the 2 logged tokens",
    ),
    "another mask at the start": (
        [
            u.tool_result(0, 0),
            u.partial(0, 0, start=0, end=2),
            w.session_done(0, 0, tokens=[2], arrays=MASKED),
        ],
        "g0.s0: its array loss_mask does not begin with the 2 logged tokens",
    ),
    "other versions at the start": (
        [
            u.partial(0, 0, start=0, end=2),
            w.session_done(0, 0, last_versions=[1], payload={"segments": [[[0, 0, 1], [1, 1, 3]]]}),
        ],
        "g0.s0: its versions do not begin with those of the 2 logged tokens",
    ),
    "less than was logged": (
        [
            u.partial(0, 0, start=0, end=3),
            u.partial(0, 0, start=3, end=4),
            w.session_done(0, 0),
        ],
        "g0.s0: its array response_ids does not begin with the 4 logged tokens",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken(tmp_path: Path, case: str) -> None:
    records, text = BROKEN[case]
    assert_violation(run_of(tmp_path, *records), text)


def test_a_repeated_row_counts_once(tmp_path: Path) -> None:
    """The other rows of its record count."""
    again = w.packed(u.partial(0, 0, start=0, end=2), u.partial(1, 0, start=0, end=2))
    run = run_of(tmp_path, u.partial(0, 0, start=0, end=2), again, w.session_done(0, 0))
    report = assert_clean(run)
    assert report.counts["log.repeated_records"] == 1
    assert report.counts["unfinished.partial_tokens"] == 4


def test_a_repeated_row_says_the_same(tmp_path: Path) -> None:
    records = [u.partial(0, 0, start=0, end=2), u.partial(0, 0, start=0, end=3)]
    assert_violation(run_of(tmp_path, *records), "partial/g0.s0/0/0 differs from its first record")


def piece(arrays: dict[str, np.ndarray] | None = None, **payload: Any) -> w.Rec:
    return u.partial(0, 0, start=0, end=3, arrays=arrays, payload=payload)


INSANE: dict[str, tuple[w.Rec, str]] = {
    "negative token": (piece({"token_ids": np.array([1, -1, 1], "<i4")}), "a token is negative"),
    "nan": (piece({"logprobs": np.array([0, np.nan, 0], "<f4")}), "not a finite number"),
    "mask of twos": (piece({"loss_mask": np.array([1, 2, 1], "|u1")}), "not of zeros and ones"),
    "fewer tokens": (piece({"token_ids": np.ones(2, "<i4")}), "2 token_ids, expected 3"),
    "no mask": (
        piece(arrays_as=[["token_ids", "<i4", [3], 256, 12], ["logprobs", "<f4", [3], 320, 12]]),
        "its arrays are",
    ),
    "other sessions": (piece(sessions=[[0, 1]]), "its sessions are [[0, 1]], not [[0, 0]]"),
    "another attempt": (piece(attempts=[1]), "its attempts are [1], not [0]"),
    "another start": (piece(starts=[1]), "its starts are [1], not [0]"),
    "another end": (piece(ends=[4]), "its ends are [4], not [3]"),
    "no versions": (piece(segments=[[]]), "its segments end at 0 of 3"),
    "other versions": (piece(segments=[[[1, 0, 3]]]), "its versions are [1]"),
    "a version too few": (piece(segments=[]), "0 segments for 1 sessions"),
    "an empty row": (u.partial(0, 0, start=0, end=0), "rows of [0] tokens"),
    "a row backwards": (u.partial(0, 0, start=2, end=1), "rows of [-1] tokens"),
    "a row before the first token": (u.partial(0, 0, start=-1, end=1), "rows of [2] tokens"),
    "no rows": (
        u.partial(0, 0, start=0, end=1, sessions=[]),
        "it has no rows",
    ),
    "a session twice": (
        w.packed(u.partial(0, 0, start=0, end=1), u.partial(0, 0, start=1, end=2)),
        "g0.s0 has two rows",
    ),
    "columns of other lengths": (
        u.partial(0, 0, start=0, end=1, ends=[1, 2]),
        "2 ends for 1 sessions",
    ),
}


@pytest.mark.parametrize("case", INSANE)
def test_insane_tokens(tmp_path: Path, case: str) -> None:
    record, text = INSANE[case]
    assert_violation(run_of(tmp_path, record), text)


def test_a_start_that_cannot_be_read_is_no_second_finding(tmp_path: Path) -> None:
    records = [piece({"token_ids": np.ones(2, "<i4")}), w.session_done(0, 0)]
    assert len(audit_run(run_of(tmp_path, *records)).findings) == 1
