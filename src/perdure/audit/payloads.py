"""Trajectories as the payload stream has them: readable, complete and sane.

P prompt tokens, T response tokens, n tokens of a partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from perdure.audit.history import Event
from perdure.audit.report import Findings
from perdure.audit.schema import session_key
from perdure.audit.segments import ALIGNMENT, Record, Segment

Arrays = dict[str, memoryview]

TRAJECTORY, PARTIAL_TOKENS = 101, 102
TRAJECTORY_ARRAYS = {
    "prompt_ids": "<i4",
    "response_ids": "<i4",
    "logprobs": "<f4",
    "loss_mask": "|u1",
}
PARTIAL_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4"}
ITEM_BYTES = 4
"""Of tokens and log-probabilities."""
MAX_LOGPROB = 1e-3
"""A log-probability is not positive, beyond rounding."""

REFERENCE_RULE = "a payload reference leads to a valid record with that checksum"
SANE_RULE = "a payload is whole and is what its control record says"


class Payloads:
    """Follows payload references and judges what they lead to."""

    def __init__(
        self, records: Mapping[tuple[int, int, int], tuple[Segment, Record]], findings: Findings
    ) -> None:
        self._records = records
        self._findings = findings

    def check_session(self, event: Event, prompt: list[int]) -> None:
        """Check the trajectory of a ``session_done`` record.

        Args:
            event: The record.
            prompt: Prompt of the group (P).
        """
        key = f"trajectory/{session_key(event.fields['session'])}"
        found = self._follow(event, type_=TRAJECTORY, key=key)
        if found is None:
            return
        try:
            fields, arrays = _contents(*found, expected=TRAJECTORY_ARRAYS)
            _check_trajectory(event.fields, fields, arrays=arrays, prompt=prompt)
        except (KeyError, TypeError, ValueError) as error:
            self._findings.violation(event.where, f"{key}: {error}", SANE_RULE)

    def check_partial(self, event: Event) -> None:
        """Check the tokens of a ``partial`` record."""
        start, end = event.fields["start"], event.fields["end"]
        key = f"partial_tokens/{session_key(event.fields['session'])}/{start}"
        found = self._follow(event, type_=PARTIAL_TOKENS, key=key)
        if found is None:
            return
        try:
            _, arrays = _contents(*found, expected=PARTIAL_ARRAYS)
            _check_tokens(arrays["token_ids"], arrays["logprobs"], count=end - start)
        except (KeyError, TypeError, ValueError) as error:
            self._findings.violation(event.where, f"{key}: {error}", SANE_RULE)

    def trajectory(self, event: Event) -> Arrays:
        """Arrays of a ``session_done`` record that :meth:`check_session` has passed."""
        incarnation, number, offset, *_ = event.fields["payload"]
        return _contents(*self._records[incarnation, number, offset], expected=TRAJECTORY_ARRAYS)[1]

    def _follow(self, event: Event, *, type_: int, key: str) -> tuple[Segment, Record] | None:
        incarnation, number, offset, length, checksum = event.fields["payload"]
        found = self._records.get((incarnation, number, offset))
        if found is None or (found[1].end - offset, found[1].checksum) != (length, checksum):
            what = "no record" if found is None else "another record"
            place = f"payload segment {number} of incarnation {incarnation}, byte {offset}"
            self._findings.damage(event.where, f"{what} at {place}", REFERENCE_RULE)
            return None
        if found[1].type != type_ or found[1].key_hash != xxhash.xxh3_64_intdigest(key.encode()):
            self._findings.violation(event.where, f"its payload is not {key}", REFERENCE_RULE)
            return None
        return found


def _contents(
    segment: Segment, record: Record, *, expected: Mapping[str, str]
) -> tuple[dict[str, Any], Arrays]:
    """Fields and arrays of a payload record.

    Raises:
        ValueError: An array is missing, of another type, or does not fit its record.
    """
    fields = segment.fields(record) or {}
    arrays: Arrays = {}
    for name, dtype, shape, offset, size in fields.get("arrays", ()):
        start = record.offset + offset
        if [size] != [length * int(dtype[2:]) for length in shape] or dtype != expected.get(name):
            raise ValueError(f"array {name} is {dtype} of shape {shape} in {size} bytes")
        if offset % ALIGNMENT or offset < ALIGNMENT or start + size > record.end:
            raise ValueError(f"array {name} lies at byte {offset} of its record")
        arrays[name] = segment.view[start : start + size]
    if arrays.keys() != expected.keys():
        raise ValueError(f"its arrays are {sorted(arrays)}")
    return fields, arrays


def _check_trajectory(
    done: Mapping[str, Any], fields: Mapping[str, Any], *, arrays: Arrays, prompt: list[int]
) -> None:
    """Raises ``ValueError`` with what does not fit."""
    mask = arrays["loss_mask"].tobytes()
    if np.frombuffer(arrays["prompt_ids"], "<i4").tolist() != prompt:
        raise ValueError("its prompt is not that of its group")
    if mask.count(1) != done["tokens"] or mask.count(0) + mask.count(1) != len(mask):
        raise ValueError(f"{done['tokens']} tokens, but the loss mask has {mask.count(1)} ones")
    _check_tokens(arrays["response_ids"], arrays["logprobs"], count=len(mask))
    edge, versions = 0, set[int]()
    for version, start, end in fields["segments"]:
        if start != edge or end <= start:
            raise ValueError(f"a segment from {start} to {end} follows token {edge}")
        edge = end
        versions.add(version)
    if edge != len(mask):
        raise ValueError(f"its segments end at {edge} of {len(mask)} tokens")
    if versions and (done["first_version"], done["last_version"]) != (min(versions), max(versions)):
        raise ValueError(f"its versions are {sorted(versions)}")
    if (fields["session"], fields["stop_reason"]) != (done["session"], done["stop_reason"]):
        raise ValueError(f"session {fields['session']} with {fields['stop_reason']}")


def _check_tokens(tokens: memoryview, logprobs: memoryview, *, count: int) -> None:
    """Raises ``ValueError`` unless there are ``count`` of both, all of them possible."""
    if (len(tokens), len(logprobs)) != (count * ITEM_BYTES, count * ITEM_BYTES):
        raise ValueError(
            f"{len(tokens) // ITEM_BYTES} tokens and {len(logprobs) // ITEM_BYTES}"
            f" log-probabilities, expected {count}"
        )
    if not count:
        return
    if np.frombuffer(tokens, "<i4").min() < 0:
        raise ValueError("a token is negative")
    values = np.frombuffer(logprobs, "<f4")
    # Written so that a NaN fails it.
    if not (values.min() > -np.inf and values.max() <= MAX_LOGPROB):
        raise ValueError("a log-probability is not a finite number up to 0")
