"""Records of sessions that are not done, for the tiny writer of :mod:`audit_writer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from audit_writer import Rec


def partial(
    group: int,
    index: int,
    *,
    start: int,
    end: int,
    attempt: int = 0,
    version: int = 0,
    arrays: Mapping[str, np.ndarray] | None = None,
    payload: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Rec:
    """A Partials of one row, of tokens that ``session_done`` goes on from; as for it, changes."""
    count = max(end - start, 0)
    fields = {
        "sessions": [[group, index]],
        "attempts": [attempt],
        "starts": [start],
        "ends": [end],
        "first_versions": [version],
        "last_versions": [version],
    }
    tokens = {
        "token_ids": np.arange(start, start + count, dtype="<i4") + 10 * group,
        "logprobs": np.full(count, -0.25, "<f4"),
        "loss_mask": np.ones(count, "|u1"),
    }
    about = {
        "sessions": [[group, index]],
        "attempts": [attempt],
        "starts": [start],
        "ends": [end],
        "segments": [[[version, start, end]]],
    }
    return Rec(
        "partials",
        fields | changes,
        f"partials/g{group}.s{index}/{attempt}/{start}",
        arrays=tokens | dict(arrays or {}),
        payload=about | dict(payload or {}),
        payload_type=102,
        payload_key=f"partial_tokens/g{group}.s{index}/{attempt}/{start}",
    )


def tool_result(
    group: int, index: int, *, turn: int = 0, call: int = 0, attempt: int = 0, result: str = "x"
) -> Rec:
    fields = {
        "session": [group, index],
        "attempt": attempt,
        "turn": turn,
        "call": call,
        "tool": "search",
        "result": result,
    }
    return Rec("tool_result", fields, f"tool_result/g{group}.s{index}/{attempt}/{turn}/{call}")


def session_restarted(group: int, index: int, *, attempt: int = 1) -> Rec:
    fields = {"session": [group, index], "attempt": attempt, "reason": "the sandbox is gone"}
    return Rec("session_restarted", fields, f"session_restarted/g{group}.s{index}/{attempt}")
