"""Trajectories of several sessions in one payload record: whole, sane, and what control says.

N rows (sessions), P prompt tokens and T response tokens of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.audit.schema import session_key

Arrays = dict[str, memoryview]
Ints = NDArray[np.int64]
Fields = Mapping[str, Any]

MAX_LOGPROB = 1e-3
"""A log-probability is not positive, beyond rounding."""

_ITEM_BYTES = {"token_ids": 4, "prompt_ids": 4, "response_ids": 4, "logprobs": 4, "loss_mask": 1}


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The rows of a Trajectories record.

    Attributes:
        fields: Its fields, whose columns are of the right types and have one element per row.
        arrays: Its arrays as bytes; those of all rows follow each other.
        prompt_ends_N: Where each row's prompt ends in ``prompt_ids``.
        response_ends_N: Where each row's response ends in the other arrays.
    """

    fields: Fields
    arrays: Arrays
    prompt_ends_N: Ints
    response_ends_N: Ints

    @classmethod
    def of(cls, fields: Fields, arrays: Arrays) -> Trajectories:
        """Find the rows.

        Raises:
            ValueError: The lengths do not divide the arrays into one part per row.
        """
        lengths = fields["prompt_tokens"], fields["response_tokens"]
        if min(map(min, lengths)) < 0:
            raise ValueError(f"prompts of {lengths[0]} and responses of {lengths[1]} tokens")
        prompt_tokens, response_tokens = map(sum, lengths)
        counts = dict.fromkeys(("response_ids", "logprobs", "loss_mask"), response_tokens)
        problem = lengths_problem(arrays, {"prompt_ids": prompt_tokens, **counts})
        if problem:
            raise ValueError(problem)
        return cls(fields, arrays, *(np.cumsum(lengths_N, dtype=np.int64) for lengths_N in lengths))

    def response(self, row: int, name: str) -> memoryview:
        """One row's part of the array ``name``, as bytes."""
        start = int(self.response_ends_N[row - 1]) if row else 0
        size = _ITEM_BYTES[name]
        return self.arrays[name][start * size : int(self.response_ends_N[row]) * size]

    def problems(self, done: Fields, prompts: Mapping[int, bytes | None]) -> Iterator[str]:
        """What is wrong with the rows, or is not what their SessionsDone record says.

        Args:
            done: Fields of the SessionsDone record.
            prompts: Prompt of every known group, as :attr:`arrays` hold one.
        """
        if self.fields["sessions"] != done["sessions"]:
            yield f"its sessions are {', '.join(map(session_key, self.fields['sessions']))}"
            return
        problems = (
            *self._prompt_problems(prompts),
            *self._mask_problems(done["tokens"]),
            *self._token_problems(),
            *self._segment_problems(done),
        )
        for row, problem in problems:
            yield f"{session_key(done['sessions'][row])}: {problem}"

    def _prompt_problems(self, prompts: Mapping[int, bytes | None]) -> Iterator[tuple[int, str]]:
        ids = self.arrays["prompt_ids"].tobytes()
        start = 0
        for row, (group, _) in enumerate(self.fields["sessions"]):
            end = _ITEM_BYTES["prompt_ids"] * int(self.prompt_ends_N[row])
            if group in prompts and ids[start:end] != prompts[group]:
                yield row, "its prompt is not that of its group"
            start = end

    def _mask_problems(self, tokens: Sequence[int]) -> Iterator[tuple[int, str]]:
        mask_T = np.frombuffer(self.arrays["loss_mask"], "|u1")
        for row in self._rows_of(mask_T > 1):
            yield row, "its loss mask is not of zeros and ones"
        ones = np.concatenate(([0], np.cumsum(mask_T == 1)))[self.response_ends_N]
        for row, count in enumerate(np.diff(ones, prepend=0).tolist()):
            if count != tokens[row]:
                yield row, f"{tokens[row]} tokens, but the loss mask has {count} ones"

    def _token_problems(self) -> Iterator[tuple[int, str]]:
        for wrong_T, problem in token_faults(self.arrays["response_ids"], self.arrays["logprobs"]):
            for row in self._rows_of(wrong_T):
                yield row, problem

    def _rows_of(self, wrong_T: NDArray[np.bool_]) -> list[int]:
        return rows_of(wrong_T, self.response_ends_N)

    def _segment_problems(self, done: Fields) -> Iterator[tuple[int, str]]:
        start = 0
        for row, end in enumerate(self.response_ends_N.tolist()):
            segments = self.fields["segments"][row]
            problem = cover_problem(segments, end=end - start)
            versions = sorted({version for version, _, _ in segments})
            said = (done["first_versions"][row], done["last_versions"][row])
            if not problem and versions and (versions[0], versions[-1]) != said:
                problem = f"its versions are {versions}"
            stopped = self.fields["stop_reasons"][row]
            if not problem and stopped != done["stop_reasons"][row]:
                problem = f"it stopped with {stopped}"
            if problem:
                yield row, problem
            start = end


def rows_of(wrong_T: NDArray[np.bool_], ends_N: Ints) -> list[int]:
    """Rows in which at least one token is wrong."""
    positions = np.flatnonzero(wrong_T)
    return np.unique(np.searchsorted(ends_N, positions, side="right")).tolist()


def lengths_problem(arrays: Arrays, counts: Mapping[str, int]) -> str:
    """Which array has not the count of elements that it should have; empty if none."""
    for name, count in counts.items():
        found = len(arrays[name]) // _ITEM_BYTES[name]
        if found != count:
            return f"{found} {name}, expected {count}"
    return ""


def token_faults(tokens: memoryview, logprobs: memoryview) -> list[tuple[NDArray[np.bool_], str]]:
    """What tokens and log-probabilities cannot be: where it is so, and what it is."""
    values = np.frombuffer(logprobs, "<f4")
    # Written so that a NaN is a fault.
    possible = (values > -np.inf) & (values <= MAX_LOGPROB)
    faults = (
        (np.frombuffer(tokens, "<i4") < 0, "a token is negative"),
        (~possible, "a log-probability is not a finite number up to 0"),
    )
    return [fault for fault in faults if fault[0].any()]


def cover_problem(segments: Sequence[Sequence[int]], *, end: int, begin: int = 0) -> str:
    """Why segments do not cover tokens ``begin`` to ``end``; empty if they do."""
    edge = begin
    for _, start, stop in segments:
        if start != edge or stop <= start:
            return f"a segment from {start} to {stop} follows token {edge}"
        edge = stop
    return "" if edge == end else f"its segments end at {edge} of {end} tokens"
