"""Payload records as the payload stream has them: where they should be, readable and whole."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import xxhash

from perdure.audit.history import Event
from perdure.audit.partials import PartialTokens
from perdure.audit.report import Findings
from perdure.audit.schema import PARTIAL_TOKENS, TRAJECTORIES, misfit, partial_key, session_key
from perdure.audit.segments import ALIGNMENT, Record, Segment
from perdure.audit.trajectories import Arrays, Trajectories

TRAJECTORIES_ARRAYS = {
    "prompt_ids": "<i4",
    "response_ids": "<i4",
    "logprobs": "<f4",
    "loss_mask": "|u1",
}
PARTIAL_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "loss_mask": "|u1"}

REFERENCE_RULE = "a payload reference leads to a valid record with that checksum"
SANE_RULE = "a payload is whole and is what its control record says"


class Payloads:
    """Follows payload references and judges what they lead to."""

    def __init__(
        self, records: Mapping[tuple[int, int, int], tuple[Segment, Record]], findings: Findings
    ) -> None:
        self._records = records
        self._findings = findings

    def check_sessions(
        self, event: Event, prompts: Mapping[int, bytes | None]
    ) -> Trajectories | None:
        """Check the trajectories of a SessionsDone record, all its rows at once.

        Args:
            event: The record.
            prompts: :func:`packed_ids` of the prompt of every group that was submitted.

        Returns:
            The trajectories, unless they cannot be read; what is wrong goes to the findings.
        """
        key = f"trajectories/{session_key(event.fields['sessions'][0])}"
        found = self._follow(event, type_=TRAJECTORIES, key=key)
        if found is None:
            return None
        try:
            fields, arrays = _contents(*found, expected=TRAJECTORIES_ARRAYS)
            problem = misfit(TRAJECTORIES, fields)
            if problem:
                raise ValueError(problem)
            trajectories = Trajectories.of(fields, arrays)
            problems = list(trajectories.problems(event.fields, prompts))
        except (KeyError, TypeError, ValueError) as error:
            self._findings.violation(event.where, f"{key}: {error}", SANE_RULE)
            return None
        for problem in problems:
            self._findings.violation(event.where, f"{key}: {problem}", SANE_RULE)
        return trajectories

    def check_partials(self, event: Event) -> PartialTokens | None:
        """Check the tokens of a Partials record, all its rows at once.

        Returns:
            The tokens, unless they cannot be read; what is wrong goes to the findings.
        """
        key = f"partial_tokens/{partial_key(event.fields, 0)}"
        found = self._follow(event, type_=PARTIAL_TOKENS, key=key)
        if found is None:
            return None
        try:
            fields, arrays = _contents(*found, expected=PARTIAL_ARRAYS)
            problem = misfit(PARTIAL_TOKENS, fields)
            if problem:
                raise ValueError(problem)
            tokens = PartialTokens.of(fields, arrays, said=event.fields)
        except (KeyError, TypeError, ValueError) as error:
            self._findings.violation(event.where, f"{key}: {error}", SANE_RULE)
            return None
        for problem in tokens.problems(event.fields):
            self._findings.violation(event.where, f"{key}: {problem}", SANE_RULE)
        return tokens

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


def packed_ids(token_ids: list[int]) -> bytes | None:
    """Token ids as an array of a payload holds them; None if one of them does not fit."""
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error:
        return None


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
