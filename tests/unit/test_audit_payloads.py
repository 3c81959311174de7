"""What the audit demands of trajectories: there, whole, sane, and those of their session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import audit_writer as w
import numpy as np
import pytest
from audit_cases import assert_violation

from perdure.audit import audit_run


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
    assert [finding.severity for finding in report.findings] == ["damage"]
    assert text in report.findings[0].what
