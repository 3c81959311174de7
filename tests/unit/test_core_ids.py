"""Ids: keys are built and read back in one place; positions and versions order as documented."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.ids import (
    CheckpointName,
    GlobalStep,
    GroupId,
    IncarnationNumber,
    LocalUpdate,
    LogPosition,
    SessionId,
    UpdateId,
)

_COUNTS = st.integers(0, 2**63)


@given(group=_COUNTS, index=_COUNTS)
def test_a_session_key_reads_back(group: int, index: int) -> None:
    session = SessionId(GroupId(group), index)
    assert SessionId.parse(session.key()) == session


def test_a_session_key_is_what_the_format_page_says() -> None:
    assert SessionId(GroupId(12), 3).key() == "g12.s3"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "g1",
        "g1.",
        "g1.s",
        "g.s1",
        "s1.g1",
        "1.1",
        "g1.s1.s1",
        "g1_0.s0",
        "g-1.s0",
        "g+1.s0",
        "g01.s0",
        " g1.s0",
        "g1.s0\n",
        "g１.s0",
    ],
)
def test_anything_else_is_no_session_key(key: str) -> None:
    with pytest.raises(ValueError, match="not a session key"):
        SessionId.parse(key)


def test_update_keys_and_order() -> None:
    updates = [UpdateId(GlobalStep(s), LocalUpdate(u)) for s in (2, 10) for u in (0, 1)]
    assert [update.key() for update in updates] == ["u2.0", "u2.1", "u10.0", "u10.1"]
    assert all(a < b for a, b in itertools.pairwise(updates))


def test_positions_order_by_incarnation_then_segment_then_offset() -> None:
    positions = [
        LogPosition(IncarnationNumber(1), 0, 900),
        LogPosition(IncarnationNumber(1), 2, 64),
        LogPosition(IncarnationNumber(2), 0, 0),
        LogPosition(IncarnationNumber(2), 0, 64),
    ]
    assert all(a < b for a, b in itertools.pairwise(positions))


@pytest.mark.parametrize(
    ("phase", "directory"), [("train", "step-00000010-2"), ("warm", "warm-00000010-2")]
)
def test_a_checkpoint_has_a_directory(phase: str, directory: str) -> None:
    assert CheckpointName(phase, 10, IncarnationNumber(2)).directory == directory
