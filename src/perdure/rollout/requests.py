"""What every engine checks: requests, whether one is over already, and who may publish."""

from __future__ import annotations

import math

from perdure.core.errors import FencedError
from perdure.core.ids import IncarnationNumber
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import MIN_TEMPERATURE, GenerationRequest, SamplingParams


def check_request(request: GenerationRequest) -> None:
    """Raises ``ValueError``: no engine could serve it."""
    sampling, name = request.sampling, request.request_id
    _check_sampling(sampling, name)
    if not (request.prompt_ids and request.random_key):
        raise ValueError(f"request {name!r} needs at least one prompt token and one random key")
    spent = len(request.prefix_ids)
    if spent > sampling.max_new_tokens:
        raise ValueError(
            f"request {name!r}: a prefix of {spent} tokens exceeds the budget of "
            f"{sampling.max_new_tokens}"
        )


def prefix_end(request: GenerationRequest) -> StopReason | None:
    """Why nothing is left to generate: the prefix ends in a stop token, or fills the budget."""
    prefix, sampling = request.prefix_ids, request.sampling
    if prefix and prefix[-1] in sampling.stop_token_ids:
        return StopReason.STOP
    return StopReason.LENGTH if len(prefix) == sampling.max_new_tokens else None


def _check_sampling(sampling: SamplingParams, name: str) -> None:
    temperature = sampling.temperature
    warm = MIN_TEMPERATURE <= temperature < math.inf
    for field, value, holds, rule in (
        ("temperature", temperature, temperature == 0 or warm, f"0 or at least {MIN_TEMPERATURE}"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "1 or more"),
    ):
        if not holds:
            raise ValueError(f"request {name!r}: {field} is {value!r}; it must be {rule}")


def check_incarnation(
    incarnation: IncarnationNumber, *, seen: IncarnationNumber
) -> IncarnationNumber:
    """The highest incarnation seen, this one included.

    Raises:
        FencedError: A higher one has published here (spec H5).
    """
    if incarnation < seen:
        raise FencedError(
            f"incarnation {incarnation} publishes to an engine that serves incarnation {seen}",
            where="rollout engine",
            rule="an engine takes weights of the highest incarnation it has seen",
            way_out="nothing: the newer one goes on",
        )
    return incarnation
