"""A request's result depends on its own content alone; in deterministic mode to the bit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import GenerationRequest, SamplingParams
from perdure.models import ModelConfig, Transformer, init_weights, weights_of
from perdure.rollout import EmbeddedEngine, EngineOptions

MAX_TOKENS = 40
MODEL = ModelConfig(
    vocab_size=13,
    hidden_size=20,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate_size=37,
    tie_embeddings=False,
    qk_norm=True,
    max_positions=MAX_TOKENS,
)


@cache
def weights() -> dict[str, torch.Tensor]:
    model = Transformer(MODEL)
    init_weights(model, 1)
    assert model.lm_head is not None
    with torch.no_grad():
        model.embed.weight.mul_(50)
        model.lm_head.weight.mul_(15)
    return weights_of(model)


@dataclass(frozen=True)
class Visit:
    """A request, the event-loop turn at which it comes, and the one at which it is aborted."""

    request: GenerationRequest
    arrives: int
    aborted_at: int | None


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 30]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    max_new_tokens=st.integers(1, 16),
    stop_token_ids=st.sampled_from([(), (0,), (3, 5, 7)]),
)
requests = st.builds(
    GenerationRequest,
    request_id=st.just("?"),
    prompt_ids=st.lists(st.integers(0, 12), min_size=1, max_size=24).map(tuple),
    sampling=samplings,
    random_key=st.tuples(st.integers(0, 2**40), st.integers(0, 9)),
)
visits = st.builds(
    Visit,
    request=requests,
    arrives=st.integers(0, 20),
    aborted_at=st.one_of(st.none(), st.integers(1, 12)),
)


async def read(engine: EmbeddedEngine, request: GenerationRequest) -> tuple[list[int], bytes]:
    chunks = [chunk async for chunk in engine.generate(request)]
    tokens = [token for chunk in chunks for token in chunk.token_ids.tolist()]
    return tokens, b"".join(chunk.logprobs.tobytes() for chunk in chunks)


async def visit(engine: EmbeddedEngine, guest: Visit) -> tuple[list[int], bytes]:
    for _ in range(guest.arrives):
        await asyncio.sleep(0)
    task = asyncio.create_task(read(engine, guest.request))
    if guest.aborted_at is not None:
        for _ in range(guest.aborted_at):
            await asyncio.sleep(0)
        await engine.abort([guest.request.request_id])
    return await task


def serve(
    company: list[Visit], *, slots: int, deterministic: bool
) -> list[tuple[list[int], bytes]]:
    async def main() -> list[tuple[list[int], bytes]]:
        options = EngineOptions(
            slots=slots, max_tokens=MAX_TOKENS, chunk_tokens=5, deterministic=deterministic
        )
        engine = EmbeddedEngine(MODEL, options)
        await engine.load_weights(PolicyVersion(1), weights())
        named = [
            replace(guest, request=replace(guest.request, request_id=f"r{index}"))
            for index, guest in enumerate(company)
        ]
        found = await asyncio.gather(*(visit(engine, guest) for guest in named))
        await engine.close()
        return found

    return asyncio.run(main())


quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@quick
@given(company=st.lists(visits, min_size=1, max_size=9), slots=st.integers(1, 7))
def test_deterministic_bits_do_not_depend_on_company(company: list[Visit], slots: int) -> None:
    together = serve(company, slots=slots, deterministic=True)
    for guest, (tokens, logprobs) in zip(company, together, strict=True):
        alone = replace(guest, arrives=0, aborted_at=None)
        [(expected, expected_logprobs)] = serve([alone], slots=slots, deterministic=True)
        assert tokens == expected[: len(tokens)]
        assert logprobs == expected_logprobs[: len(logprobs)]
        if guest.aborted_at is None:
            assert len(tokens) == len(expected)


@quick
@given(company=st.lists(visits, min_size=1, max_size=9), slots=st.integers(1, 7))
def test_free_running_results_agree_up_to_rounding(company: list[Visit], slots: int) -> None:
    together = serve(company, slots=slots, deterministic=False)
    for guest, (tokens, logprobs) in zip(company, together, strict=True):
        alone = replace(guest, arrives=0, aborted_at=None)
        [(expected, expected_logprobs)] = serve([alone], slots=3, deterministic=True)
        assert tokens == expected[: len(tokens)]
        np.testing.assert_allclose(
            np.frombuffer(logprobs, np.float32),
            np.frombuffer(expected_logprobs, np.float32)[: len(tokens)],
            atol=2e-5,
        )
