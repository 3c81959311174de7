"""What the audit demands of trajectories: there, whole, sane, and those of their sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit_unfinished as u
import audit_writer as w
import numpy as np
import pytest
from audit_cases import assert_violation

from perdure.audit import audit_run


def i4(*values: int) -> np.ndarray:
    return np.array(values, "<i4")


def f4(*values: float) -> np.ndarray:
    return np.array(values, "<f4")


def u1(*values: int) -> np.ndarray:
    return np.array(values, "|u1")


INSANE_ROWS: dict[str, tuple[w.Rec, str]] = {
    "other prompt": (w.session_done(0, 0, arrays={"prompt_ids": i4(1, 2, 3)}), "its prompt is not"),
    "shorter prompt": (
        w.session_done(0, 0, arrays={"prompt_ids": i4(1, 2)}, payload={"prompt_tokens": [2]}),
        "its prompt is not",
    ),
    "nan": (w.session_done(0, 0, arrays={"logprobs": f4(-1, np.nan, -1)}), "not a finite number"),
    "minus infinity": (
        w.session_done(0, 0, arrays={"logprobs": f4(-np.inf, -np.inf, -1)}),
        "not a finite number",
    ),
    "positive": (w.session_done(0, 0, arrays={"logprobs": f4(-1, -1, 0.5)}), "not a finite number"),
    "negative token": (w.session_done(0, 0, arrays={"response_ids": i4(-1, 2, 3)}), "is negative"),
    "mask of twos": (
        w.session_done(0, 0, tokens=[2], arrays={"loss_mask": u1(1, 1, 2)}),
        "its loss mask is not of zeros and ones",
    ),
    "token count": (
        w.session_done(0, 0, tokens=[2]),
        "2 tokens, but the loss mask has 3 ones",
    ),
    "token count beyond the mask": (
        w.session_done(0, 0, arrays={"loss_mask": u1(1, 0, 1)}),
        "3 tokens, but the loss mask has 2 ones",
    ),
    "gap between segments": (
        w.session_done(0, 0, payload={"segments": [[[0, 0, 1], [0, 2, 3]]]}),
        "a segment from 2 to 3 follows token 1",
    ),
    "empty segment": (
        w.session_done(0, 0, payload={"segments": [[[0, 0, 0], [0, 0, 3]]]}),
        "a segment from 0 to 0",
    ),
    "uncovered end": (
        w.session_done(0, 0, payload={"segments": [[[0, 0, 2]]]}),
        "its segments end at 2 of 3",
    ),
    "no segments": (w.session_done(0, 0, payload={"segments": [[]]}), "its segments end at 0 of 3"),
    "first version": (w.session_done(0, 0, first_versions=[1]), "its versions are [0]"),
    "last version": (w.session_done(0, 0, last_versions=[1]), "its versions are [0]"),
    "version in between": (
        w.session_done(0, 0, payload={"segments": [[[1, 0, 2], [0, 2, 3]]]}),
        "its versions are [0, 1]",
    ),
    "other stop reason": (
        w.session_done(0, 0, payload={"stop_reasons": ["length"]}),
        "it stopped with length",
    ),
}


def run_with(path: Path, record: w.Rec) -> Path:
    """Two groups that are open, and this record."""
    before = [w.published(0, step=0), w.published(1, step=0), w.submitted(0), w.submitted(1)]
    before += [u.tool_result(0, 0)]
    return w.plain(path, lambda _: [*before, record])


def between(record: w.Rec) -> w.Rec:
    """A row in the middle of sane ones."""
    return w.packed(w.session_done(1, 0), record, w.session_done(1, 1))


@pytest.mark.parametrize("make", [lambda record: record, between], ids=["alone", "between"])
@pytest.mark.parametrize("case", INSANE_ROWS)
def test_insane_row(tmp_path: Path, case: str, make: Callable[[w.Rec], w.Rec]) -> None:
    record, text = INSANE_ROWS[case]
    findings = audit_run(run_with(tmp_path, make(record))).findings
    assert len(findings) == 1
    assert findings[0].severity == "violation"
    assert ": g0.s0: " in findings[0].what
    assert text in findings[0].what


def test_every_insane_row_is_named(tmp_path: Path) -> None:
    positive = {"logprobs": f4(-1, -1, 0.5)}
    record = w.packed(
        w.session_done(0, 0, arrays=positive),
        w.session_done(0, 1, tokens=[7]),
        w.session_done(1, 0, arrays=positive),
        w.session_done(1, 1),
    )
    lines = [finding.what for finding in audit_run(run_with(tmp_path, record)).findings]
    assert [line.split(": ")[1] for line in sorted(lines)] == ["g0.s0", "g0.s1", "g1.s0"]


def test_rows_without_tokens_between_others(tmp_path: Path) -> None:
    """Of an empty row nothing is taken for a token of its neighbours."""
    none = {"response_ids": i4(), "logprobs": f4(), "loss_mask": u1()}
    empty = {
        "tokens": [0],
        "arrays": none,
        "payload": {"response_tokens": [0], "segments": [[]]},
    }
    rows = (
        w.session_done(0, 0, **empty),
        w.session_done(0, 1, arrays={"logprobs": f4(-1, -1, -1, 1)}),
        w.session_done(1, 0, **empty),
    )
    findings = audit_run(run_with(tmp_path, w.packed(*rows))).findings
    assert [finding.what.split(": ")[1] for finding in findings] == ["g0.s1"]


def two_rows(payload: dict[str, Any] | None = None, **arrays: np.ndarray) -> w.Rec:
    """Sessions of three and four tokens, with some fields and arrays in place of theirs."""
    record = w.packed(w.session_done(0, 0), w.session_done(0, 1))
    record.arrays |= arrays
    record.payload |= payload or {}
    return record


def payload_of(**fields: Any) -> w.Rec:
    return w.session_done(0, 0, payload=fields)


INSANE: dict[str, tuple[w.Rec, str]] = {
    "fewer log-probabilities": (two_rows(logprobs=f4(-1, -1)), "2 logprobs, expected 7"),
    "more tokens": (two_rows(response_ids=i4(*range(8))), "8 response_ids, expected 7"),
    "shorter mask": (two_rows(loss_mask=u1(1)), "1 loss_mask, expected 7"),
    "more prompt": (two_rows(prompt_ids=i4(*range(8))), "8 prompt_ids, expected 6"),
    "a length too few": (
        two_rows({"response_tokens": [7]}),
        "1 response_tokens for 2 sessions",
    ),
    "a length too many": (
        two_rows({"prompt_tokens": [3, 3, 0]}),
        "3 prompt_tokens for 2 sessions",
    ),
    "negative length": (two_rows({"response_tokens": [-1, 8]}), "responses of [-1, 8] tokens"),
    "negative length of a prompt": (two_rows({"prompt_tokens": [7, -1]}), "prompts of [7, -1]"),
    "lengths short of the arrays": (
        two_rows({"response_tokens": [3, 3]}),
        "7 response_ids, expected 6",
    ),
    "lengths beyond the arrays": (
        two_rows({"prompt_tokens": [3, 1 << 63]}),
        f"6 prompt_ids, expected {(1 << 63) + 3}",
    ),
    "lengths that are no integers": (
        two_rows({"prompt_tokens": [3.0, 3]}),
        "field prompt_tokens of type 101",
    ),
    "lengths of responses that are no integers": (
        two_rows({"response_tokens": [3, 4.0]}),
        "field response_tokens of type 101",
    ),
    "other session": (payload_of(sessions=[[0, 1]]), "its sessions are g0.s1"),
    "no rows": (
        payload_of(sessions=[], prompt_tokens=[], response_tokens=[], segments=[], stop_reasons=[]),
        "it has no rows",
    ),
    "a row too many": (
        payload_of(
            sessions=[[0, 0], [0, 1]],
            prompt_tokens=[3, 0],
            response_tokens=[3, 0],
            segments=[[[0, 0, 3]], []],
            stop_reasons=["stop", "stop"],
        ),
        "its sessions are g0.s0, g0.s1",
    ),
    "segments of fewer rows": (payload_of(segments=[]), "0 segments for 1 sessions"),
    "stop reasons of more rows": (
        payload_of(stop_reasons=["stop", "stop"]),
        "2 stop_reasons for 1 sessions",
    ),
    "sessions that are no pairs": (payload_of(sessions=[[0]]), "field sessions of type 101"),
    "segments that are no triples": (payload_of(segments=[[[0, 3]]]), "field segments of type 101"),
    "segments of fractions": (payload_of(segments=[[[0, 0.0, 3]]]), "field segments of type 101"),
    "stop reasons that are no texts": (payload_of(stop_reasons=[1]), "field stop_reasons of type"),
    "other type": (w.session_done(0, 0, arrays={"logprobs": np.zeros(3)}), "array logprobs is <f8"),
    "two dimensions": (
        w.session_done(0, 0, arrays={"response_ids": np.ones((1, 3), "<i4")}),
        "of shape [1, 3]",
    ),
    "an array too many": (w.session_done(0, 0, arrays={"extra": i4(1)}), "array extra is <i4"),
    "an array too few": (
        payload_of(arrays_as=[["prompt_ids", "<i4", [3], 256, 12]]),
        "its arrays are ['prompt_ids']",
    ),
    "unaligned array": (
        payload_of(arrays_as=[["prompt_ids", "<i4", [3], 260, 12]]),
        "lies at byte 260",
    ),
    "array in the header": (
        payload_of(arrays_as=[["prompt_ids", "<i4", [3], 0, 12]]),
        "lies at byte 0",
    ),
    "array beyond the record": (
        payload_of(arrays_as=[["prompt_ids", "<i4", [3], 6400, 12]]),
        "lies at byte 6400",
    ),
    "no arrays named": (payload_of(arrays_as=7), "trajectories/g0.s0: "),
}


@pytest.mark.parametrize("case", INSANE)
def test_insane_payload(tmp_path: Path, case: str) -> None:
    record, text = INSANE[case]
    assert_violation(run_with(tmp_path, record), text)


def test_sessions_in_another_order(tmp_path: Path) -> None:
    record = w.packed(w.session_done(0, 0), w.session_done(0, 1), w.session_done(1, 0))
    record.payload["sessions"] = [[0, 0], [1, 0], [0, 1]]
    assert_violation(run_with(tmp_path, record), "its sessions are g0.s0, g1.s0, g0.s1")


@pytest.mark.parametrize("token", [1 << 31, -(1 << 31) - 1])
@pytest.mark.parametrize("prompt", [i4(1, 2, 0), i4()], ids=len)
def test_prompt_that_no_payload_can_hold(tmp_path: Path, token: int, prompt: np.ndarray) -> None:
    submitted = w.submitted(0, prompt_ids=[1, 2, token])
    length = {"prompt_tokens": [len(prompt)]}
    done = w.session_done(0, 0, arrays={"prompt_ids": prompt}, payload=length)
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), submitted, done])
    assert_violation(run, "g0.s0: its prompt is not that of its group")


def test_payload_of_another_session(tmp_path: Path) -> None:
    record = w.session_done(0, 0)
    record.payload_key = "trajectories/g0.s1"
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, "its payload is not trajectories/g0.s0")


def test_payload_of_another_type(tmp_path: Path) -> None:
    record = w.session_done(0, 0)
    record.payload_type = 103
    run = w.plain(tmp_path, lambda _: [w.published(0, step=0), w.submitted(0), record])
    assert_violation(run, "its payload is not trajectories/g0.s0")


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, 7, "no record"),
        (2, 64, "no record"),
        (3, 64, "another record"),
        (4, 1, "another record"),
    ],
)
@pytest.mark.parametrize("make", [w.session_done, u.partial])
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
    assert [finding.severity for finding in report.findings] == ["damage"]
    assert text in report.findings[0].what
