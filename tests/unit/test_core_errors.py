"""Errors: one sentence, an exit code of their own, unchanged across process boundaries."""

from __future__ import annotations

import pickle
import weakref

import pytest

from perdure.core import errors
from perdure.core.errors import ConfigError, PerdureError, StorageError, without_frames

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, PerdureError)
]


def test_the_sentence_has_four_parts() -> None:
    error = ConfigError("must be positive", where="steps", rule="steps >= 1", way_out="raise it")
    assert str(error) == "steps: must be positive; steps >= 1; way out: raise it"


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({}, "failed"),
        ({"where": "log"}, "log: failed"),
        ({"rule": "never"}, "failed; never"),
        ({"way_out": "resume"}, "failed; way out: resume"),
    ],
)
def test_absent_parts_leave_no_trace(parts: dict[str, str], sentence: str) -> None:
    assert str(StorageError("failed", **parts)) == sentence


@pytest.mark.parametrize("kind", KINDS)
def test_errors_cross_process_boundaries_unchanged(kind: type[PerdureError]) -> None:
    error = kind("what", where="where", rule="rule", way_out="way out")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.what, copy.where, copy.rule, copy.way_out) == (
        error.what,
        error.where,
        error.rule,
        error.way_out,
    )


def test_exit_codes_are_distinct_and_never_success() -> None:
    codes = [kind.exit_code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 256 for code in codes)


def test_an_error_that_is_kept_holds_on_to_nothing_its_functions_held() -> None:
    class Held:
        pass

    def fail() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        try:
            raise OSError(5, "no disk")
        except OSError as cause:
            # Its cause was never raised, but what that was made of was.
            unraised = StorageError("cannot sync", where="a")
            unraised.__cause__ = ExceptionGroup("both", [cause])
            raise StorageError("cannot write", where="a") from unraised

    kept: list[StorageError] = []
    alive: list[weakref.ref[Held]] = []
    try:
        fail()
    except StorageError as error:
        kept.append(error)
    assert alive[0]() is not None
    assert without_frames(kept[0]) is kept[0]
    assert isinstance(kept[0].__cause__, StorageError)
    assert alive[0]() is None
