"""Messages between an engine's process and its client, in whatever pieces they arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import DamagedError, EngineLostError
from perdure.core.ids import PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationChunk, GenerationRequest, SamplingParams
from perdure.rollout.engine_messages import (
    Inbox,
    chunk_fields,
    chunk_from,
    error_fields,
    error_from,
    pack,
    request_fields,
    request_from,
)

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
REQUESTS = st.builds(
    GenerationRequest,
    request_id=st.text(max_size=9),
    prompt_ids=IDS,
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 9),
        top_k=st.integers(0, 9),
        top_p=st.floats(0.1, 1),
        max_new_tokens=st.integers(1, 999),
        stop_token_ids=IDS,
    ),
    random_key=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
    prefix_ids=IDS,
)
CHUNKS = st.builds(
    lambda tokens, version, reason: GenerationChunk(
        np.array(tokens, np.int32),
        -np.arange(len(tokens), dtype=np.float32),
        PolicyVersion(version),
        reason,
    ),
    IDS,
    st.integers(-1, 99),
    st.sampled_from([None, *StopReason]),
)


@given(
    requests=st.lists(REQUESTS, max_size=3),
    chunks=st.lists(CHUNKS, max_size=3),
    piece=st.integers(1, 40),
)
def test_what_arrives_is_what_was_sent(
    requests: list[GenerationRequest], chunks: list[GenerationChunk], piece: int
) -> None:
    fields = [*map(request_fields, requests), *map(chunk_fields, chunks)]
    sent = b"".join(map(pack, fields))
    inbox = Inbox()
    received = [
        message
        for start in range(0, len(sent), piece)
        for message in inbox.feed(sent[start : start + piece])
    ]
    assert [request_from(message) for message in received[: len(requests)]] == requests
    for message, chunk in zip(received[len(requests) :], chunks, strict=True):
        found = chunk_from(message)
        assert found.token_ids.dtype == np.int32
        assert found.logprobs.dtype == np.float32
        assert found.token_ids.tolist() == chunk.token_ids.tolist()
        assert found.logprobs.tolist() == chunk.logprobs.tolist()
        assert (found.version, found.stop_reason) == (chunk.version, chunk.stop_reason)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("too long"), ValueError("too long")),
        (RuntimeError("asleep"), RuntimeError("asleep")),
        (KeyError("odd"), RuntimeError("KeyError: 'odd'")),
        (
            DamagedError("bytes", where="f", rule="r", way_out="w"),
            DamagedError("bytes", where="f", rule="r", way_out="w"),
        ),
        (EngineLostError("gone"), EngineLostError("gone")),
    ],
)
def test_errors_keep_their_class_and_text(error: Exception, expected: Exception) -> None:
    found = error_from(error_fields(error))
    assert type(found) is type(expected)
    assert str(found) == str(expected)
