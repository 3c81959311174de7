"""What an engine's process and its client say to each other: msgpack lists over one socket.

Client to process: ``configure`` (first), ``generate``, ``drop``, ``call``. Process to client:
``hello`` (first), ``chunk``, ``failed``, ``answer``, ``refused``, ``beat``. A number joins what
belongs together. Both ends are of the same version; nothing of this is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np

from perdure.core import errors
from perdure.core.errors import PerdureError
from perdure.core.ids import PolicyVersion
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationChunk, GenerationRequest, SamplingParams

MAX_MESSAGE_BYTES = 2**28
VERBS = ("abort", "pause", "resume", "sleep", "wake", "load_weights")

pack: Callable[[object], bytes] = msgpack.packb
"""One message as bytes."""


class Inbox:
    """Turns received bytes into messages, whatever the pieces they come in."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=MAX_MESSAGE_BYTES)

    def feed(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        """Every message that is whole by now."""
        self._unpacker.feed(data)
        return iter(self._unpacker)


def request_fields(request: GenerationRequest) -> tuple[Any, ...]:
    """A request as msgpack-able values; :func:`request_from` reads them back."""
    sampling = request.sampling
    return (
        request.request_id,
        request.prompt_ids,
        (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.max_new_tokens,
            sampling.stop_token_ids,
        ),
        request.random_key,
        request.prefix_ids,
    )


def request_from(fields: tuple[Any, ...]) -> GenerationRequest:
    """The request of :func:`request_fields`."""
    request_id, prompt_ids, sampling, random_key, prefix_ids = fields
    return GenerationRequest(
        request_id, prompt_ids, SamplingParams(*sampling), random_key, prefix_ids
    )


def chunk_fields(chunk: GenerationChunk) -> tuple[Any, ...]:
    """A chunk as msgpack-able values; :func:`chunk_from` reads them back."""
    reason = None if chunk.stop_reason is None else chunk.stop_reason.value
    return chunk.token_ids.tobytes(), chunk.logprobs.tobytes(), chunk.version, reason


def chunk_from(fields: tuple[Any, ...]) -> GenerationChunk:
    """The chunk of :func:`chunk_fields`; its arrays are read-only views."""
    tokens, logprobs, version, reason = fields
    return GenerationChunk(
        np.frombuffer(tokens, np.int32),
        np.frombuffer(logprobs, np.float32),
        PolicyVersion(version),
        None if reason is None else StopReason(reason),
    )


def error_fields(error: Exception) -> tuple[str, tuple[str, ...]]:
    """Class and text of an error that callers know; anything else becomes a ``RuntimeError``."""
    if isinstance(error, PerdureError):
        return type(error).__name__, (error.what, error.where, error.rule, error.way_out)
    if isinstance(error, ValueError):
        return "ValueError", (str(error),)
    known = isinstance(error, RuntimeError)
    return "RuntimeError", (str(error) if known else f"{type(error).__name__}: {error}",)


def error_from(fields: tuple[str, tuple[str, ...]]) -> Exception:
    """The error of :func:`error_fields`."""
    name, texts = fields
    if name == "ValueError":
        return ValueError(*texts)
    cls = getattr(errors, name, None)
    if isinstance(cls, type) and issubclass(cls, PerdureError):
        what, where, rule, way_out = texts
        return cls(what, where=where, rule=rule, way_out=way_out)
    return RuntimeError(*texts)
