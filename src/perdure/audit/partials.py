"""Partial tokens of several sessions in one payload record: whole, sane, and what control says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perdure.audit.schema import session_key
from perdure.audit.trajectories import (
    Arrays,
    Fields,
    Ints,
    cover_problem,
    lengths_problem,
    rows_of,
    token_faults,
)

_ITEM_BYTES = {"token_ids": 4, "logprobs": 4, "loss_mask": 1}
_SHARED = ("sessions", "attempts", "starts", "ends")


@dataclass(frozen=True, slots=True)
class PartialTokens:
    """The rows of a PartialTokens record.

    Attributes:
        fields: Its fields, whose columns are of the right types and have one element per row.
        arrays: Its arrays as bytes; those of all rows follow each other.
        ends_N: Where each row ends in the arrays.
    """

    fields: Fields
    arrays: Arrays
    ends_N: Ints

    @classmethod
    def of(cls, fields: Fields, arrays: Arrays, *, said: Fields) -> PartialTokens:
        """Find the rows.

        Args:
            fields: Of the payload record.
            arrays: Of the payload record.
            said: Fields of the Partials record that refers to it.

        Raises:
            ValueError: The rows are others than the Partials record says, or do not divide the
                arrays into one part for each.
        """
        for name in _SHARED:
            if fields[name] != said[name]:
                raise ValueError(f"its {name} are {fields[name]}, not {said[name]}")
        lengths = [end - start for start, end in zip(fields["starts"], fields["ends"], strict=True)]
        if min(lengths) < 1 or min(fields["starts"]) < 0:
            raise ValueError(f"rows of {lengths} tokens from {fields['starts']}")
        problem = lengths_problem(arrays, dict.fromkeys(_ITEM_BYTES, sum(lengths)))
        if problem:
            raise ValueError(problem)
        return cls(fields, arrays, np.cumsum(lengths, dtype=np.int64))

    def piece(self, row: int, name: str) -> bytes:
        """One row's part of the array ``name``."""
        start = int(self.ends_N[row - 1]) if row else 0
        size = _ITEM_BYTES[name]
        return bytes(self.arrays[name][start * size : int(self.ends_N[row]) * size])

    def problems(self, said: Fields) -> Iterator[str]:
        """What is wrong with the rows, or is not what their Partials record says."""
        mask_T = np.frombuffer(self.arrays["loss_mask"], "|u1")
        faults = [
            *token_faults(self.arrays["token_ids"], self.arrays["logprobs"]),
            (mask_T > 1, "its loss mask is not of zeros and ones"),
        ]
        for wrong_T, problem in faults:
            for row in rows_of(wrong_T, self.ends_N):
                yield f"{session_key(said['sessions'][row])}: {problem}"
        for row, segments in enumerate(self.fields["segments"]):
            start, end = said["starts"][row], said["ends"][row]
            problem = cover_problem(segments, begin=start, end=end)
            versions = sorted({version for version, _, _ in segments})
            said_versions = (said["first_versions"][row], said["last_versions"][row])
            if not problem and (versions[0], versions[-1]) != said_versions:
                problem = f"its versions are {versions}"
            if problem:
                yield f"{session_key(said['sessions'][row])}: {problem}"
