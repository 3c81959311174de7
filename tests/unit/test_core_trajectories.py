"""Trajectories check that their arrays agree and that segments cover the response."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from perdure.core.ids import GroupId, PolicyVersion, SessionId
from perdure.core.record_types import StopReason
from perdure.core.trajectories import Segment, Trajectory


def _segments(*pieces: tuple[int, int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(PolicyVersion(version), start, end) for version, start, end in pieces)


def _trajectory(**changes: Any) -> Trajectory:
    whole = Trajectory(
        session=SessionId(GroupId(0), 0),
        prompt_ids_P=np.arange(3, dtype=np.int32),
        response_ids_T=np.arange(5, dtype=np.int32),
        logprobs_T=np.zeros(5, np.float32),
        loss_mask_T=np.ones(5, np.uint8),
        segments=_segments((4, 0, 2), (6, 2, 5)),
        stop_reason=StopReason.STOP,
    )
    return dataclasses.replace(whole, **changes)


def test_a_whole_trajectory_passes_and_knows_its_versions() -> None:
    trajectory = _trajectory()
    trajectory.check()
    assert trajectory.version_range() == (4, 6)


def test_an_empty_response_has_no_segments() -> None:
    empty = np.zeros(0, np.int32)
    _trajectory(response_ids_T=empty, logprobs_T=empty, loss_mask_T=empty, segments=()).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs_T": np.zeros(4, np.float32)},
        {"loss_mask_T": np.ones(6, np.uint8)},
        {"segments": ()},
        {"segments": _segments((4, 0, 4))},
        {"segments": _segments((4, 1, 5))},
        {"segments": _segments((4, 0, 2), (6, 3, 5))},
        {"segments": _segments((4, 0, 3), (6, 2, 5))},
    ],
)
def test_what_does_not_agree_fails_the_check(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^the tokens of g0\.s0 do not fit together: "):
        _trajectory(**changes).check()
